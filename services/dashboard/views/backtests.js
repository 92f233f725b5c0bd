// Back-tests of data rules, from the file that `bapo backtest --page` writes. The browser alone reads it.

import { field, fill, h } from "../dom.js";
import { announce, refusal } from "../live.js";
import { table } from "../tables.js";

/** Returns the card in which a reader opens a file of back-tests. */
export function backTestCard() {
  const shown = h("div", { class: "back-tests" });
  const input = h("input", {
    type: "file",
    accept: ".json,application/json",
    // Without this, a file that was written again could not be opened again.
    onclick: () => (input.value = ""),
    onchange: () => input.files.length > 0 && read(input.files[0]),
  });
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Back-tests"),
    h(
      "p",
      { class: "note" },
      "What other data rules would have trained on, without training: ",
      h("code", {}, "bapo backtest NAME --rules examples/variants/rules.yaml --page"),
      " writes it to runs/NAME-backtest. Compare runs decides between the rules that are left.",
    ),
    field("Open backtest.json", input),
    shown,
  );

  async function read(file) {
    let tests;
    try {
      tests = JSON.parse(await file.text());
    } catch {
      return refuse(file, "It holds no JSON");
    }
    if (!isBackTest(tests)) return refuse(file, "It has no tables of back-tests");
    fill(shown, backTests(tests));
    announce(`${file.name} is shown`);
  }

  function refuse(file, why) {
    const title = `${file.name} cannot be shown`;
    fill(shown, refusal({ title, message: `${why}; open the backtest.json of bapo backtest --page.` }));
  }
}

const isText = (value) => typeof value === "string";
const isTexts = (values) => Array.isArray(values) && values.every(isText);

function isBackTest(tests) {
  return (
    isText(tests?.caveat) &&
    Array.isArray(tests.runs) &&
    tests.runs.every((test) => isText(test?.run)) &&
    Array.isArray(tests.tables) &&
    tests.tables.every(
      (one) =>
        isText(one?.title) &&
        isText(one.note) &&
        isTexts(one.headings) &&
        isTexts(one.meanings) &&
        Array.isArray(one.rows) &&
        one.rows.every((row) => isText(row?.rules) && isTexts(row.cells)),
    )
  );
}

function backTests({ caveat, runs, tables }) {
  return [
    h("p", {}, h("strong", {}, caveat)),
    tables.map((one) => [
      one.note && h("p", { class: "note" }, one.note),
      table({
        caption: `${one.title}, by the groups of ${runs.map(({ run }) => run).join(", ")}`,
        rows: one.rows,
        columns: [
          { title: "Rules", cell: (row) => row.rules },
          ...one.headings.map((title, i) => ({
            title,
            hint: one.meanings[i],
            number: true,
            cell: (row) => row.cells[i],
          })),
        ],
      }),
    ]),
  ];
}
