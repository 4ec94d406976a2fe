/** The state of the engine from its events: speed, steps, prefix cache, drafters, replicas. */

import { $, count, draw, make, percent, sum } from "./dom.js";
import {
  LOSSES, PARTS, added, drawBars, highest, nameOf, namesOf, textOf, wordsOf,
} from "./drafters.js";
import { ask, events, Refused } from "./server.js";

/** @typedef {import("./drafters.js").Tally} Tally */
/**
 * @typedef {[at: number, level: number, span: number, tokens: number, used: boolean, hits: number]}
 *   TreeRow cached tokens: first row, depth in the tree, height in rows, tokens, in use, hits
 */
/** @typedef {{at: number, span: number, start: number, tokens: number, hits: number}} Box */
/**
 * @typedef {object} Reuse a request, and the place of its tokens in the cache
 * @property {string} id
 * @property {number} prompt_tokens
 * @property {number} cached_tokens
 * @property {number[]} boxes indices into the tree
 */
/**
 * @typedef {object} Replica
 * @property {number} number
 * @property {number} pid
 * @property {string} state
 * @property {number} running
 * @property {number} waiting
 * @property {number} kv_usage
 */
/**
 * @typedef {object} State the state of the engine, sent once a second
 * @property {number} time
 * @property {number} tokens
 * @property {number} running
 * @property {number} waiting
 * @property {TreeRow[]} tree
 * @property {Reuse[]} requests
 * @property {Record<string, number>} causes number of prompts by the cause that ended reuse
 * @property {number} prefix_queries
 * @property {number} prefix_hits
 * @property {Tally} proposed
 * @property {Tally} accepted
 * @property {Replica[]} [replicas]
 * @property {{held: number, pinned: number, cached: number, free: number}} pages
 * @property {Record<string, number>} parts seconds of steps
 * @property {{seconds: number, tokens: number} | null} [row]
 * @property {Record<string, number>} sampling
 * @property {string} [sampling_origin]
 */
/** @typedef {{latest_steps: Tally[], replicas?: number[]}} Steps and their replicas */

const SECONDS = 60, SHOWN = 96, SHOWN_OF_ONE = 24, LEAST_RATE = 10, FRAMES = 10;
const RETRY_MS = 2000;
const ROW_PX = 24, TREE_PX = 130;
const GREYS = ["var(--ink)", "var(--dim)", "var(--edge)", "var(--soft)"];

/** @type {number[]} */
const rates = new Array(SECONDS).fill(0);
/** @type {Tally[]} */
const arrived = [];
/** @type {Map<number, Tally[]>} */
const replicaSteps = new Map();
/** @type {Tally[]} */
let shown = [];
/** @type {State | null} */
let before = null;
/** @type {AbortController | null} */
export let watching = null;

/**
 * Draw the tokens per second; without an earlier event, only the plot.
 * @param {State} now
 */
function drawRate(now) {
  if (before && now.time > before.time) {
    const made = Math.max(0, now.tokens - before.tokens); // Negative after a replica is lost.
    const rate = made / (now.time - before.time);
    rates.push(rate);
    rates.shift();
    $("rate").textContent = rate.toFixed(0);
    $("rate").classList.toggle("idle", rate < .5);
    $("most").textContent = `at most ${Math.max(...rates).toFixed(0)} in the last minute`;
    $("open-engine").textContent = `${rate.toFixed(0)} tokens/s`;
  }
  const most = Math.max(LEAST_RATE, ...rates);
  const points = rates.map((rate, index) =>
    `${index * SECONDS / (SECONDS - 1)},${(97 - 92 * rate / most).toFixed(1)}`);
  $("spark").replaceChildren(
    draw("path", { d: `M0,100L${points.join("L")}L60,100z` }),
    draw("polyline", { points: points.join(" ") }),
  );
  const label = `Tokens per second in the last 60 seconds, at most ${most.toFixed(0)}`;
  $("spark").setAttribute("aria-label", label);
  $("load").textContent = `${count(now.running, "request")} running, ${now.waiting} waiting`;
}

/** Draw a part of the steps that arrived, and the rest in the next frames. */
function drawSteps() {
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const few = isStill ? arrived.length : Math.max(1, Math.round(arrived.length / FRAMES));
  shown = [...shown, ...arrived.splice(0, few)].slice(-SHOWN);
  const tally = added(shown), mean = sum(Object.values(tally)) / shown.length;
  drawBars($("steps"), shown, { slots: SHOWN });
  const label = `The last ${count(shown.length, "step")}: ${textOf(tally)}`;
  $("steps").setAttribute("aria-label", label);
  $("steps-text").textContent =
    `last ${shown.length}: ${mean.toFixed(1)} tokens on average, at most ${highest(shown)}`;
  $("steps-names").replaceChildren(...namesOf(tally));
  if (arrived.length) requestAnimationFrame(drawSteps);
}

/**
 * @param {TreeRow[]} tree
 * @returns {Box[]}
 */
function boxesOf(tree) {
  /** @type {number[]} */
  const ends = []; // Ends of the latest boxes, by level.
  return tree.map(([at, level, span, tokens, , hits]) => {
    const start = level ? ends[level - 1] : 0;
    ends[level] = start + tokens;
    return { at, span, start, tokens, hits };
  });
}

/**
 * @param {Box} box
 * @param {{fill: string, opacity: number, start?: number, tokens?: number}} look
 *   `start` and `tokens` select a part of the box
 */
function drawBox(box, { fill, opacity, start = box.start, tokens = box.tokens }) {
  const title = `${count(box.tokens, "token")}, reused by ${count(box.hits, "request")}`;
  const place = { x: start, y: box.at, width: Math.max(.1, tokens), height: box.span };
  const node = draw("rect", place, draw("title", {}, title));
  node.style.fill = fill;
  node.style.fillOpacity = String(opacity);
  return node;
}

/**
 * Draw the boxes of one request; reused tokens are darker than added ones.
 * @param {Box[]} boxes
 * @param {Reuse} mine
 */
function drawMine(boxes, mine) {
  const nodes = mine.boxes.flatMap((index) => {
    const box = boxes[index], fill = "var(--ink)";
    const old = Math.min(box.tokens, Math.max(0, mine.cached_tokens - box.start));
    const start = box.start + old, tokens = box.tokens - old;
    return [
      ...(old > 0 ? [drawBox(box, { fill, opacity: 1, tokens: old })] : []),
      ...(tokens > 0 ? [drawBox(box, { fill, opacity: .55, start, tokens })] : []),
    ];
  });
  for (const node of nodes) node.classList.add("mine");
  return nodes;
}

/**
 * @param {State} now
 * @param {Reuse | undefined} mine the latest request of the conversation
 */
function drawTree(now, mine) {
  const boxes = boxesOf(now.tree);
  const most = Math.max(1, ...boxes.map((box) => box.start + box.tokens));
  const rows = Math.max(1, ...boxes.map((box) => box.at + box.span));
  const hottest = Math.log1p(Math.max(1, ...boxes.map((box) => box.hits)));
  const others = boxes.map((box) =>
    drawBox(box, { fill: "var(--dim)", opacity: .2 + .3 * Math.log1p(box.hits) / hottest }));
  $("tree").setAttribute("viewBox", `0 0 ${most} ${rows}`);
  $("tree").style.height = `${Math.min(TREE_PX, ROW_PX * rows)}px`;
  $("tree").replaceChildren(...others, ...(mine ? drawMine(boxes, mine) : []));
  const label = boxes.length ? `Cached tokens, ${boxes.length} boxes` : "Nothing is cached yet";
  $("tree").setAttribute("aria-label", label);
  $("tree-end").textContent = boxes.length ? `${most.toLocaleString("en")} tokens` : "";
}

/**
 * @param {State} now
 * @param {Reuse | undefined} mine
 */
function describeCache(now, mine) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const [strong, faint] = isDark ? ["Bright", "Dim"] : ["Dark", "Light"];
  const reused = mine && `${mine.cached_tokens} of ${mine.prompt_tokens} tokens reused. `;
  $("reused").textContent = reused ?? "";
  $("tree-text").textContent = mine
    ? `${strong}: reused by this conversation. Medium: added by its last turn. ` +
      `${faint}: other conversations.`
    : "Cached texts run from left to right and branch where they differ.";
  $("causes").textContent = Object.entries(now.causes)
    .filter(([cause, prompts]) => LOSSES[cause] && prompts)
    .map(([cause, prompts]) => `${count(prompts, "prompt")}: ${LOSSES[cause]}`).join("; ");
  $("hits").textContent = now.prefix_queries
    ? `${percent(now.prefix_hits / now.prefix_queries)} of all prompt tokens reused` : "";
}

/** @param {State} now */
function drawDrafters(now) {
  $("drafts").replaceChildren(...Object.entries(now.proposed).sort().map(([name, proposed]) => {
    const accepted = now.accepted[name] ?? 0;
    const cells = [proposed.toLocaleString("en"), accepted.toLocaleString("en"),
      percent(accepted / proposed)];
    return make("tr", {},
      make("th", { scope: "row" }, nameOf(name), make("span", { class: "about" }, wordsOf(name))),
      ...cells.map((each) => make("td", {}, each)));
  }));
}

/** @param {Replica[]} replicas */
function drawReplicas(replicas) {
  const numbers = replicas.map((each) => each.number);
  for (const number of replicaSteps.keys()) {
    if (!numbers.includes(number)) replicaSteps.delete(number);
  }
  $("replicas").hidden = !replicas.length;
  $("replicas-rows").replaceChildren(...replicas.map((each) => {
    const cells = [String(each.running), String(each.waiting), percent(each.kv_usage),
      drawStepsOf(each.number)];
    const about = make("span", { class: "about" }, `pid ${each.pid}, ${each.state}`);
    return make("tr", {}, make("th", { scope: "row" }, String(each.number), about),
      ...cells.map((cell) => make("td", {}, cell)));
  }));
}

/**
 * Draw the latest steps of a replica as small bars; the large plot has the steps of all.
 * @param {number} number
 */
function drawStepsOf(number) {
  const steps = replicaSteps.get(number) ?? [];
  const svg = draw("svg", { class: "steps", preserveAspectRatio: "none", role: "img" });
  drawBars(svg, steps, { slots: SHOWN_OF_ONE });
  svg.setAttribute("aria-label", `The last ${count(steps.length, "step")} of replica ${number}, ` +
    `at most ${count(highest(steps), "token")}`);
  return svg;
}

/** @param {Steps} now */
function noteSteps(now) {
  if (!arrived.length) requestAnimationFrame(drawSteps);
  arrived.push(...now.latest_steps.slice(-SHOWN));
  (now.replicas ?? []).forEach((number, index) => {
    const steps = [...(replicaSteps.get(number) ?? []), now.latest_steps[index]];
    replicaSteps.set(number, steps.slice(-SHOWN_OF_ONE));
  });
}

/**
 * Draw a bar of shares, and list them as text.
 * @param {string} id
 * @param {[name: string, size: number][]} parts
 */
function drawShares(id, parts) {
  const all = sum(parts.map(([, size]) => size)) || 1;
  $(id).replaceChildren(...parts.map(([, size], index) => {
    const span = make("span");
    span.style.width = percent(size / all);
    span.style.background = GREYS[index % GREYS.length];
    return span;
  }));
  $(`${id}-text`).textContent =
    parts.map(([name, size]) => `${name} ${percent(size / all)}`).join(", ");
}

/** @param {{seconds: number, tokens: number}} row */
const priceOf = ({ seconds, tokens }) =>
  `Verifying one more draft token lengthens a step by ${(1e3 * seconds).toFixed(2)} ms. In that ` +
  `time the model would generate ${tokens.toFixed(2)} tokens, so a draft token is verified if ` +
  `its probability of acceptance is above ${percent(tokens)}.`;

/** @param {State} now */
function drawMore(now) {
  const { held, pinned, cached, free } = now.pages, old = (before ?? now).parts;
  drawShares("pages",
    [["in use by requests", held], ["pinned", pinned], ["kept for reuse", cached], ["free", free]]);
  const parts = Object.entries(now.parts).map(([name, seconds]) =>
    /** @type {[string, number]} */ ([PARTS[name] ?? name, seconds - (old[name] ?? 0)]));
  if (parts.some(([, seconds]) => seconds > 0)) drawShares("parts", parts);
  $("price").textContent = now.row ? priceOf(now.row) : "";
  const sampling = Object.entries(now.sampling)
    .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
  const origin = now.sampling_origin ? ` (${now.sampling_origin})` : "";
  $("sampling").textContent = `Default sampling: ${sampling}${origin}`;
}

/**
 * @param {State} now
 * @param {string | undefined} answerId
 */
function drawState(now, answerId) {
  const mine = now.requests.findLast((each) => each.id === answerId);
  drawRate(now);
  drawTree(now, mine);
  describeCache(now, mine);
  drawDrafters(now);
  drawReplicas(now.replicas ?? []);
  drawMore(now);
  before = now;
}

/** @param {unknown} error */
function whyNot(error) {
  const status = error instanceof Refused ? error.status : 0;
  if (status === 403) return "Requires an admin key";
  if (status === 401) return "Requires an API key";
  return `Not connected: ${/** @type {Error} */ (error).message}`;
}

/**
 * Show the events of the engine from now on, and stop an earlier connection.
 * @param {() => string | undefined} answerId the response to highlight in the cache
 */
export async function watch(answerId) {
  unwatch();
  const mine = watching = new AbortController();
  while (watching === mine) {
    try {
      for await (const now of events(await ask("ui/events", { signal: mine.signal }))) {
        if (now.latest_steps) noteSteps(now);
        else drawState(now, answerId());
      }
    } catch (error) {
      if (watching === mine) $("load").textContent = whyNot(error);
    }
    before = null;
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
  }
}

/** Stop listening to events, so that a hidden page costs the engine nothing. */
export function unwatch() {
  watching?.abort();
  watching = null;
}
