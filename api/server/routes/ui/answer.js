/** One answer: its request, the nodes that show it, and its cost. */

import { count, draw, field, make, sum } from "./dom.js";
import { LOSSES, added, classOf, drafterTable, drawBars } from "./drafters.js";
import { GrowingMarkdown } from "./markdown.js";
import { ask, events, Refused } from "./server.js";

/** @typedef {import("./drafters.js").Tally} Tally */
/**
 * @typedef {[text: string, source: string | null, channel: string]} Piece
 *   an entry of `token_sources`; null as source: the text belongs to the token before it
 */
/** @typedef {{first: number, last: number, total: number}} Times milliseconds; 0: no token */
/** @typedef {"content" | "reasoning"} Channel a text of an answer */
/** @typedef {[end: number, source: string]} Span the end of a part of a text, and its drafter */
/**
 * @typedef {object} Usage the server's counts
 * @property {number} prompt_tokens
 * @property {number} completion_tokens
 * @property {{cached_tokens: number}} prompt_tokens_details
 * @property {{verify_steps: number}} speculation
 * @property {CacheExplanation} [cache_explanation]
 */
/**
 * @typedef {object} CacheExplanation the reason why reuse of the prompt ended
 * @property {string} cause
 * @property {{position: number, now: {text: string}, before: {text: string}}} [first_token]
 */
/**
 * @typedef {object} Answer a message of the conversation, kept as JSON
 * @property {"assistant"} role
 * @property {string} content
 * @property {string} reasoning
 * @property {Piece[]} pieces
 * @property {"on" | "off"} speculation
 * @property {string} [id] of the response
 * @property {number[]} [ids] its token ids
 * @property {string} [finish]
 * @property {Usage} [usage]
 * @property {Times} [ms]
 * @property {boolean} [isDone]
 * @property {string} [error]
 * @property {Answer} [other] the answer to the same question without speculation, if side by side
 * @property {boolean} [isPrivate] it bypassed the prefix cache
 */
/**
 * @typedef {object} View
 * @property {HTMLElement} box
 * @property {() => Tally} tally
 * @property {() => void} changed schedules a drawing of new text
 * @property {() => void} redraw draws everything again at once
 */

const SLOWER = 4; // Pause after a drawing, as a multiple of its duration.
const FRAME_MS = 16;
const STEP_PX = 5;

/**
 * Return an answer that has not begun.
 * @param {"on" | "off"} speculation
 * @returns {Answer}
 */
export const blank = (speculation) =>
  ({ role: "assistant", content: "", reasoning: "", pieces: [], speculation });

/**
 * Request an answer. If the server rejects the token ids of earlier answers, for example because
 * another model made them, the request is sent again without them.
 * @param {{messages: object[]}} body
 * @param {AbortSignal} signal
 */
async function responseTo(body, signal) {
  const post = (/** @type {object} */ each) =>
    ask("v1/chat/completions", { method: "POST", signal, body: JSON.stringify(each) });
  try {
    return await post(body);
  } catch (error) {
    if (!(error instanceof Refused) || !error.param?.endsWith("token_ids")) throw error;
    const messages = /** @type {{role: string, content: string}[]} */ (body.messages);
    return post({ ...body, messages: messages.map(({ role, content }) => ({ role, content })) });
  }
}

/**
 * Add a chunk of the stream to an answer; return whether it has tokens.
 * @param {Answer} answer
 * @param {any} chunk
 */
function addChunk(answer, chunk) {
  answer.id = chunk.id;
  if (chunk.usage) answer.usage = chunk.usage;
  const [choice] = chunk.choices;
  if (!choice) return false;
  const pieces = choice.token_sources ?? [];
  answer.content += choice.delta.content ?? "";
  answer.reasoning += choice.delta.reasoning_content ?? "";
  answer.ids = choice.delta.token_ids ?? answer.ids;
  answer.finish = choice.finish_reason ?? answer.finish;
  answer.pieces.push(...pieces);
  return pieces.length > 0;
}

/**
 * Stream an answer until its end, or until it is stopped; throws `Refused`.
 * @param {Answer} answer
 * @param {{messages: object[]}} body
 * @param {AbortSignal} signal
 * @param {() => void} changed called after each chunk
 */
export async function run(answer, body, signal, changed) {
  const began = performance.now();
  let first = 0, last = 0;
  const wanted = {
    stream: true, token_sources: true, return_token_ids: true, explain_cache: true,
    stream_options: { include_usage: true },
  };
  try {
    for await (const chunk of events(await responseTo({ ...body, ...wanted }, signal))) {
      if (addChunk(answer, chunk)) {
        last = performance.now();
        first = first || last;
      }
      changed();
    }
  } catch (error) {
    if (/** @type {Error} */ (error).name !== "AbortError") throw error;
    answer.finish = "stopped";
  } finally {
    const total = performance.now() - began;
    answer.ms = { first: first && first - began, last: last && last - first, total };
    answer.isDone = true;
    changed();
  }
}

/**
 * Return the texts of the tokens. A piece whose source is null belongs to the token before it.
 * @param {Piece[]} pieces
 */
export function tokensOf(pieces) {
  /** @type {string[]} */
  const tokens = [];
  for (const [text, source] of pieces) {
    if (source === null && tokens.length) tokens[tokens.length - 1] += text;
    else tokens.push(text);
  }
  return tokens;
}

/** The steps of an answer and the drafters of its texts. Each piece is read once. */
class Pieces {
  #numRead = 0;
  #by = ""; // The drafter of the last token.
  /** @type {Tally} */
  #step = {}; // The step that has not ended.
  /** @type {Tally[]} */
  #ended = [];
  /** @type {Record<string, Span[]>} */
  #spans = { content: [], reasoning: [] };

  /** @param {Piece[]} pieces a list that may grow */
  constructor(pieces) {
    this.pieces = pieces;
  }

  /** Tokens of each step by drafter. Every step ends with a token from the model itself. */
  get steps() {
    this.#read();
    return Object.keys(this.#step).length ? [...this.#ended, this.#step] : this.#ended;
  }

  /** @param {Channel} channel */
  spans(channel) {
    this.#read();
    return this.#spans[channel];
  }

  #read() {
    for (; this.#numRead < this.pieces.length; this.#numRead += 1) {
      const [text, source, channel] = this.pieces[this.#numRead];
      this.#by = source ?? this.#by;
      if (source !== null) this.#step[source] = (this.#step[source] ?? 0) + 1;
      if (source === "") {
        this.#ended.push(this.#step);
        this.#step = {};
      }
      const spans = this.#spans[channel];
      if (text && spans) spans.push([(spans[spans.length - 1]?.[0] ?? 0) + text.length, this.#by]);
    }
  }
}

/**
 * Return a `Paint` that marks drafted tokens.
 * @param {string} text
 * @param {Span[]} spans parts of the text, in order; text after the last one is not marked
 * @returns {import("./markdown.js").Paint}
 */
export function painter(text, spans) {
  return (from, to) => {
    /** @type {{source: string, text: string}[]} */
    const parts = [];
    for (let start = from, i = spanAt(spans, from); start < to; i += 1) {
      const [end, source] = spans[i] ?? [to, ""];
      const stop = Math.min(to, end), piece = text.slice(start, stop);
      const last = parts[parts.length - 1];
      if (last?.source === source) last.text += piece;
      else if (piece) parts.push({ source, text: piece });
      start = stop;
    }
    return parts.map(({ source, text: part }) => source
      ? make("mark", { class: classOf(source), title: `drafted by ${source}` }, part) : part);
  };
}

/**
 * Return the index of the first span that ends after `from`.
 * @param {Span[]} spans
 * @param {number} from
 */
function spanAt(spans, from) {
  let low = 0, high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle][0] > from) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Say why reuse of the prompt ended; "" if nothing was lost. @param {CacheExplanation} found */
function missOf({ cause, first_token: at }) {
  if (!LOSSES[cause]) return "";
  const [now, before] = [at?.now.text, at?.before.text].map((each) => JSON.stringify(each));
  const where = at ? ` (token ${at.position}: ${now} instead of ${before})` : "";
  return `reuse ended: ${LOSSES[cause]}${where}`;
}

/** @param {number} ms */
const duration = (ms) => ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`;

/**
 * Show the cost of a complete answer: tokens, steps, speed, reuse of the prompt, drafters.
 * @param {Answer} answer
 * @param {Tally[]} steps
 */
function costOf(answer, steps) {
  const tally = added(steps), tokens = sum(Object.values(tally)), cost = [];
  const flags = { length: "stopped at the token limit", stopped: "stopped" };
  const flag = flags[/** @type {"length"} */ (answer.finish)];
  if (flag) cost.push(make("span", { class: "flag" }, flag));
  if (tokens) {
    const { usage, ms } = answer, numSteps = usage?.speculation.verify_steps ?? steps.length;
    const mean = (tokens / Math.max(1, numSteps)).toFixed(1);
    cost.push(make("span", {}, make("strong", {}, count(tokens, "token")),
      ` in ${count(numSteps, "step")}, ${mean} per step`));
    if (ms?.last) {
      const rate = ((tokens - 1) / ms.last * 1e3).toFixed(0);
      cost.push(make("span", {}, make("strong", {}, rate), " tokens per second"));
    }
    cost.push(make("span", {}, `first token after ${duration(ms?.first ?? 0)}`));
    if (usage && !answer.isPrivate) cost.push(...reuseOf(usage));
    cost.push(drafterTable(tally));
  }
  return make("div", { class: "cost small num" }, ...cost);
}

/** @param {Usage} usage */
function reuseOf(usage) {
  const found = usage.prompt_tokens_details.cached_tokens;
  const miss = usage.cache_explanation ? missOf(usage.cache_explanation) : "";
  return [
    make("span", {}, `${found} of ${usage.prompt_tokens} prompt tokens reused`),
    ...(miss ? [make("span", { class: "miss" }, miss)] : []),
  ];
}

/**
 * Make the nodes of an answer.
 * @param {Answer} answer
 * @param {{title?: string, beside?: Answer[], drawn: () => void}} about `beside`: the answers that
 *   are drawn on one scale; `drawn` is called after each drawing
 * @returns {View}
 */
export function viewOf(answer, { title, beside = [], drawn }) {
  const nodes = nodesOf(title), pieces = new Pieces(answer.pieces);
  const others = beside.filter((each) => each !== answer).map((each) => new Pieces(each.pieces));
  const content = new GrowingMarkdown(nodes.content);
  const thoughts = new GrowingMarkdown(nodes.thoughts);
  let timer = 0, spent = 0;
  function update() {
    const steps = pieces.steps;
    const grow = (/** @type {GrowingMarkdown} */ box, /** @type {Channel} */ channel) => {
      const spans = field("colours").checked ? pieces.spans(channel) : [];
      box.update(answer[channel], painter(answer[channel], spans));
    };
    nodes.waiting.hidden = answer.isDone || steps.length > 0;
    showReasoning(nodes.reasoning, answer);
    grow(thoughts, "reasoning");
    grow(content, "content");
    drawStrip(nodes.strip, steps, others.map((each) => each.steps));
    showEnd(nodes, answer, steps);
  }
  function changed() {
    if (timer) return;
    timer = setTimeout(() => {
      const began = performance.now();
      timer = 0;
      update();
      drawn();
      spent = performance.now() - began;
    }, Math.max(FRAME_MS, SLOWER * spent));
  }
  function redraw() {
    content.clear();
    thoughts.clear();
    update();
  }
  update();
  return { box: nodes.box, tally: () => added(pieces.steps), changed, redraw };
}

/** @typedef {ReturnType<typeof nodesOf>} Nodes */

/** @param {string | undefined} title */
function nodesOf(title) {
  const thoughts = make("div", { class: "md" }), content = make("div", { class: "md content" });
  const reasoning = make("details", { class: "reasoning" },
    make("summary", {}, "Reasoning"), thoughts);
  const strip = draw("svg", { class: "strip", preserveAspectRatio: "none", role: "img" });
  const waiting = make("p", { class: "waiting" }, "Reading the prompt …");
  const cost = make("div"), clock = make("span", { class: "num" });
  const head = title ? [make("h3", {}, make("span", {}, title), clock)] : [];
  const box = make("article", { class: "answer", "aria-label": title ?? "Answer" },
    ...head, reasoning, waiting, content, strip, cost);
  reasoning.hidden = true;
  return { box, thoughts, content, reasoning, strip, waiting, cost, clock };
}

/**
 * Open the reasoning until content arrives, and close it then; later the reader decides.
 * @param {HTMLDetailsElement} reasoning
 * @param {Answer} answer
 */
function showReasoning(reasoning, answer) {
  if (!answer.reasoning) return;
  const isThinking = !answer.isDone && !answer.content;
  reasoning.hidden = false;
  if (isThinking === reasoning.hasAttribute("data-thinking")) return;
  reasoning.open = isThinking;
  reasoning.toggleAttribute("data-thinking", isThinking);
}

/**
 * @param {SVGElement} strip
 * @param {Tally[]} steps
 * @param {Tally[][]} others steps of the answers drawn on the same scale
 */
function drawStrip(strip, steps, others) {
  const width = `${steps.length * STEP_PX}px`;
  const most = Math.max(steps.length, ...others.map((each) => each.length));
  strip.toggleAttribute("hidden", !steps.length);
  drawBars(strip, steps, { slots: steps.length, alike: others });
  strip.style.width = others.length ? `min(${width}, ${100 * steps.length / most}%)` : width;
  const label = `${count(steps.length, "step")}, bar height: tokens per step`;
  strip.setAttribute("aria-label", label);
}

/**
 * @param {Nodes} nodes
 * @param {Answer} answer
 * @param {Tally[]} steps
 */
function showEnd(nodes, answer, steps) {
  if (answer.isDone) nodes.clock.textContent = `${((answer.ms?.total ?? 0) / 1000).toFixed(1)} s`;
  nodes.cost.replaceChildren(
    ...(answer.isDone ? [costOf(answer, steps)] : []),
    ...(answer.error ? [make("p", { class: "wrong" }, answer.error)] : []),
  );
}

/**
 * Compare two answers side by side. They are "the same" if all their tokens are equal.
 * @param {Answer} on
 * @param {Answer} off
 */
export function verdictOf(on, off) {
  const say = (/** @type {(Node | string)[]} */ ...parts) =>
    make("p", { class: "verdict" }, ...parts);
  const quiet = (/** @type {string} */ text) => make("span", {}, text);
  if (!on.isDone || !off.isDone) {
    return say(quiet("The same question and seed: first with speculation, then without."));
  }
  if (!on.usage || !off.usage) {
    return say(quiet("Not compared: an answer is incomplete."));
  }
  if (comparable(on) !== comparable(off)) {
    const words = "The answers differ although both used one seed. Please report this bug.";
    return make("p", { class: "verdict wrong" }, words);
  }
  // Times start at the first token, because the second answer may find its prompt in the cache.
  const [fast, slow] = [on, off].map(({ ms }) => ms?.last || ms?.total || 0);
  const [short, long] = [fast, slow].map((each) => `${(each / 1000).toFixed(1)} s`);
  return say(`The same ${count(on.usage.completion_tokens, "token")}, ${speedUp(slow / fast)} `,
    quiet(`with speculation: ${short} instead of ${long} after the first token`));
}

/** @param {Answer} answer */
const comparable = ({ pieces, content, reasoning, finish, usage }) =>
  JSON.stringify([tokensOf(pieces), content, reasoning, finish, usage?.completion_tokens]);

/** @param {number} times */
function speedUp(times) {
  if (times > 1.05) return `${times.toFixed(1)} times faster`;
  return times < .95 ? `${(1 / times).toFixed(1)} times slower` : "no faster";
}
