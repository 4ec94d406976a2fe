/** Display names from the server, colours and patterns of drafters, and bars of steps. */

import { draw, make, percent, sum } from "./dom.js";
import { words } from "./words.js";

/** @typedef {Record<string, number>} Tally tokens by drafter; "" is the model itself */

const ORDER = Object.keys(words.drafters);
const OWN = "the model itself";
const LEAST_HIGH = 6; // Least height of a plot of steps, in tokens.

/** Reasons why reusable prompt tokens were computed again, by cause. */
export const LOSSES = words.losses;

/** Display names of the parts of a step's time, by their names in events. */
export const PARTS = words.parts;

/** Describe a drafter. @param {string} source */
export const wordsOf = (source) => words.drafters[source] ?? "";

/**
 * Return the CSS class with the colour and the pattern of a drafter; page.css numbers them.
 * @param {string} source
 */
export function classOf(source) {
  if (!source) return "by-own";
  const place = ORDER.indexOf(source);
  return place < 0 ? "by-other" : `by-${place + 1}`;
}

/**
 * Sort entries by name, with the model itself last.
 * @param {Tally} tally
 */
const ordered = (tally) => Object.entries(tally).sort(([one], [other]) =>
  Number(one === "") - Number(other === "") || (one < other ? -1 : 1));

/**
 * Make the name of a drafter, with its colour and its pattern.
 * @param {string} source
 * @param {...string} more
 */
export const nameOf = (source, ...more) => make("span", { class: `num ${classOf(source)}` },
  make("i", { class: "dot" }), make("span", { class: "name" }, source || OWN), ...more);

/** @param {Tally} tally */
export const namesOf = (tally) =>
  ordered(tally).map(([source, tokens]) => nameOf(source, ` ${tokens}`));

/** Return the names and token counts as text. @param {Tally} tally */
export const textOf = (tally) =>
  ordered(tally).map(([source, tokens]) => `${source || OWN} ${tokens}`).join(", ");

/** @param {Tally[]} tallies */
export function added(tallies) {
  /** @type {Tally} */
  const total = {};
  for (const tally of tallies) {
    for (const [source, tokens] of Object.entries(tally)) {
      total[source] = (total[source] ?? 0) + tokens;
    }
  }
  return total;
}

/**
 * Show tokens by drafter: a line of names, which opens to a table.
 * @param {Tally} tally
 */
export function drafterTable(tally) {
  const all = sum(Object.values(tally));
  const heads = ["Drafter", "Tokens", "Share", "Description"];
  const rows = ordered(tally).map(([source, tokens]) => make("tr", {},
    make("th", { scope: "row" }, nameOf(source)),
    ...[tokens.toLocaleString("en"), percent(tokens / all), wordsOf(source)]
      .map((each) => make("td", {}, each))));
  return make("details", { class: "by-drafter" },
    make("summary", {}, make("span", { class: "sr" }, "Tokens by drafter: "), ...namesOf(tally)),
    make("table", {},
      make("thead", {}, make("tr", {}, ...heads.map((each) => make("th", { scope: "col" }, each)))),
      make("tbody", {}, ...rows)));
}

/** Return the most tokens of any of the steps. @param {Tally[]} steps */
export const highest = (steps) =>
  steps.reduce((most, step) => Math.max(most, sum(Object.values(step))), 0);

/**
 * Draw bars of steps: the model's own token at the bottom, drafted ones above it. One path
 * per colour.
 * @param {Element} svg
 * @param {Tally[]} steps
 * @param {{slots: number, alike?: Tally[][]}} room `slots`: the bars that fit;
 *   `alike`: steps on the same scale
 */
export function drawBars(svg, steps, { slots, alike = [] }) {
  const top = Math.max(LEAST_HIGH, highest(steps), ...alike.map(highest));
  /** @type {Map<string, string>} */
  const paths = new Map();
  steps.forEach((step, index) => {
    const x = 4 * (index + slots - steps.length);
    let y = top;
    for (const [source, tokens] of ordered(step).reverse()) {
      y -= tokens;
      paths.set(source, `${paths.get(source) ?? ""}M${x} ${y}h3v${tokens}h-3z`);
    }
  });
  svg.setAttribute("viewBox", `0 0 ${slots * 4} ${top}`);
  svg.replaceChildren(...[...paths].map(([source, d]) =>
    draw("path", { d, class: `bar-part ${classOf(source)}` })));
}
