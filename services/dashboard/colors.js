// Colours that colour-blind readers can distinguish: Okabe and Ito for kinds, viridis for an order.
// A colour that differs between light and dark is a variable of the style sheet.

export const SOURCES = {
  fresh: "var(--blue)",
  reevaluated: "var(--orange)",
  replayed: "var(--green)",
};

export const KINDS = {
  fresh: "var(--blue)",
  reevaluation: "var(--orange)",
  evaluation: "var(--pink)",
};

const CYCLE = ["blue", "orange", "green", "red", "pink", "sky", "yellow", "grey"].map(
  (name) => `var(--${name})`,
);
export const series = (index) => CYCLE[index % CYCLE.length];

const VIRIDIS = [
  [68, 1, 84],
  [71, 44, 122],
  [59, 81, 139],
  [44, 113, 142],
  [33, 144, 141],
  [39, 173, 129],
  [92, 200, 99],
  [170, 220, 50],
  [253, 231, 37],
];

/** The viridis colour of a share in [0, 1]. */
function viridis(share) {
  const at = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const low = VIRIDIS[Math.floor(at)];
  const high = VIRIDIS[Math.ceil(at)];
  const mixed = low.map((value, i) => Math.round(value + (high[i] - value) * (at - Math.floor(at))));
  return `rgb(${mixed.join(" ")})`;
}

/** The colour of k of G correct: dark is none, bright is all; visible on both backgrounds. */
export const bin = (k, size) =>
  `light-dark(${viridis((0.94 * k) / size)}, ${viridis(0.14 + (0.86 * k) / size)})`;
