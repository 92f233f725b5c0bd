// Lists the routes of the REST API, from the service's own OpenAPI document.

import { fill, h } from "./dom.js";

/** Returns a type of a JSON schema in words. */
function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.join(" | ");
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.map(typeOf).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function table(caption, rows) {
  if (!rows.length) return null;
  const cells = (row) => row.map((cell) => h("td", {}, cell));
  return h(
    "table",
    {},
    h("caption", {}, caption),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))),
  );
}

const fields = (schema, caption) =>
  table(
    caption,
    Object.entries(schema?.properties ?? {}).map(([name, property]) => [
      h("code", {}, name),
      typeOf(property),
      property.description ?? "",
    ]),
  );

function operation(path, method, described, schemas) {
  const content = (described.requestBody?.content ?? {})["application/json"]?.schema;
  // A body that may be left out is one of two types.
  const reference = [content, ...(content?.anyOf ?? [])].find((schema) => schema?.$ref);
  const body = reference ? schemas[typeOf(reference)] : content;
  const parameters = (described.parameters ?? []).map((parameter) => [
    h("code", {}, parameter.name),
    `${parameter.in}, ${typeOf(parameter.schema)}`,
    parameter.description ?? "",
  ]);
  const answer = described.responses?.["200"]?.content?.["application/json"]?.schema;
  return h(
    "details",
    {},
    h("summary", {}, h("code", {}, `${method.toUpperCase()} ${path}`)),
    h("p", {}, described.description ?? described.summary),
    described["x-scopes"] && h("p", { class: "note" }, `Scopes: ${described["x-scopes"].join(", ")}`),
    table("Parameters", parameters),
    fields(body, "Body"),
    answer && h("p", { class: "note" }, `Answers ${typeOf(answer)}.`),
  );
}

/** Returns a section for each tag, in the document's order. */
function sections(document) {
  const tags = new Map();
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, described] of Object.entries(methods)) {
      const tag = described.tags?.[0] ?? "other";
      if (!tags.has(tag)) tags.set(tag, []);
      tags.get(tag).push(operation(path, method, described, document.components.schemas));
    }
  }
  return [...tags].map(([tag, operations]) => h("section", { class: "card" }, h("h2", {}, tag), operations));
}

async function show(main) {
  const response = await fetch("openapi.json");
  if (!response.ok) return fill(main, h("p", { role: "alert" }, `openapi.json: ${response.status}`));
  const document = await response.json();
  const models = Object.entries(document.components.schemas).map(([name, schema]) =>
    h(
      "details",
      {},
      h("summary", {}, h("code", {}, name)),
      h("p", {}, schema.description),
      fields(schema, "Fields"),
    ),
  );
  fill(
    main,
    h("h1", {}, document.info.title),
    h("p", {}, document.info.description),
    h("p", {}, "The same for programs: ", h("a", { href: "openapi.json" }, "openapi.json"), "."),
    sections(document),
    h("section", { class: "card" }, h("h2", {}, "models"), models),
  );
}

show(window.document.getElementById("main"));
