/** The page: a conversation with the model, next to the state of the engine. */

import { blank, run, tokensOf, verdictOf, viewOf } from "./answer.js";
import { $, copyButton, count, field, make } from "./dom.js";
import { nameOf } from "./drafters.js";
import { unwatch, watch } from "./engine.js";
import { drawHistory, fresh, keepOpen, keepSettings, lastOpen, save } from "./history.js";
import { ask, keepKey, Refused } from "./server.js";
import { welcome } from "./welcome.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {import("./answer.js").View} View */
/** @typedef {import("./history.js").Conversation} Conversation */
/** @typedef {import("./history.js").Question} Question */
/** @typedef {"on" | "off" | "both"} Mode how to answer; both: side by side */

const FIELDS = ["temperature", "max_tokens", "seed"]; // Settings; empty fields are not sent.
const MAX_SEED = 2 ** 31;
const MAX_ROWS = 12; // Rows of a message that is being edited.
const NEAR_PX = 48, AT_END_PX = 2; // Distances from the end of the conversation.

/** The conversation that is shown. */
export let chat = fresh();
/** @type {AbortController | null} */
let running = null; // Aborts the answer that is being generated.
/** @type {View[]} */
let views = [];
let model = "the model";
let isFollowing = true, lastTop = 0; // Whether the end stays in view; the last scroll position.

// -- conversations --------------------------------------------------------------------------------

/** @param {Conversation} conversation */
function open(conversation) {
  stop();
  chat = conversation;
  keepOpen(chat);
  field("system").value = chat.system;
  for (const name of FIELDS) field(name).value = String(chat.settings[name] ?? "");
  hideAlert();
  drawLog();
  follow();
  $("text").focus();
}

function readSettings() {
  chat.system = field("system").value;
  for (const name of FIELDS) {
    const { value } = field(name);
    if (value === "") delete chat.settings[name];
    else chat.settings[name] = Number(value);
  }
  keepSettings(chat.settings);
}

/** Return the id of the latest response that used the prefix cache. */
const latestId = () => chat.messages.filter(isAnswer)
  .findLast((each) => each.id && !each.isPrivate)?.id;

async function loadModel() {
  try {
    const [served] = (await (await ask("v1/models")).json()).data;
    const { temperature } = served.default_sampling_params;
    const longest = served.max_model_len.toLocaleString("en");
    model = served.id;
    $("model").textContent = model;
    field("temperature").placeholder = `the model's default (${temperature})`;
    field("max_tokens").placeholder = `up to the context length (${longest} with the prompt)`;
    if (!chat.messages.length) drawLog();
  } catch (error) {
    showAlert(error);
  }
}

// -- the log --------------------------------------------------------------------------------------

/** @returns {message is Answer} @param {Question | Answer} message */
const isAnswer = (message) => message.role === "assistant";

/**
 * @param {Question} message
 * @param {number} index
 */
function questionView(message, index) {
  const view = make("div", { class: "said" });
  const edit = make("button", { type: "button" }, "Edit");
  const tools = make("div", { class: "tools" }, edit, copyButton(() => message.content));
  const show = () => view.replaceChildren(make("div", { class: "bubble" }, message.content), tools);
  const cancel = () => {
    show();
    edit.focus();
  };
  edit.addEventListener("click", () => {
    if (running) return;
    const { form, area } = editForm(message.content, { send: (text) => send(text, index), cancel });
    view.replaceChildren(form);
    area.focus();
  });
  show();
  return view;
}

/**
 * @param {string} text
 * @param {{send: (text: string) => void, cancel: () => void}} end
 */
function editForm(text, end) {
  const rows = Math.min(MAX_ROWS, text.split("\n").length + 1);
  const area = make("textarea", { "aria-label": "Edit the message", rows });
  const buttons = make("div", {}, make("button", { type: "button", click: end.cancel }, "Cancel"),
    make("button", { class: "dark" }, "Send"));
  const form = make("form", {}, area, buttons);
  area.value = text;
  area.addEventListener("keydown", (event) => {
    if (isEnter(event)) {
      event.preventDefault();
      form.requestSubmit();
    } else if (event.key === "Escape") {
      event.stopPropagation(); // Otherwise it would stop an answer.
      end.cancel();
    }
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim()) end.send(area.value.trim());
  });
  return { form, area };
}

/**
 * @param {Answer} answer
 * @param {boolean} isLast
 */
function answerView(answer, isLast) {
  const again = isLast ? [make("button", { type: "button", click: regenerate }, "Regenerate")] : [];
  const tools = make("div", { class: "tools" }, copyButton(() => answer.content), ...again);
  const isOver = !running || !isLast;
  const view = (/** @type {Answer} */ each, about = {}) => {
    const made = viewOf(each, { ...about, drawn: () => { drawLegend(); scroll(); } });
    views.push(made);
    return made.box;
  };
  if (!answer.other) {
    const box = view(answer);
    if (isOver) box.append(tools);
    return box;
  }
  const beside = [answer, answer.other];
  const two = make("div", { class: "two" }, view(answer, { title: "Speculation on", beside }),
    view(answer.other, { title: "Speculation off", beside }));
  const verdict = verdictOf(answer, answer.other);
  return make("div", { class: "pair" }, two, verdict, ...(isOver ? [tools] : []));
}

function drawLog() {
  const { messages } = chat, last = messages.length - 1;
  views = [];
  $("log").replaceChildren(...messages.map((each, index) =>
    isAnswer(each) ? answerView(each, index === last) : questionView(each, index)));
  if (!messages.length) $("log").append(welcome(model, send));
  drawLegend();
}

/** Show the names of the drafters of all visible answers. */
function drawLegend() {
  const sources = new Set(views.flatMap((view) => Object.keys(view.tally())));
  const names = [...sources].filter(Boolean).sort(), key = names.join();
  $("legend").hidden = !names.length;
  if ($("legend").dataset.key === key) return;
  $("legend").dataset.key = key;
  $("drafted-by").replaceChildren("Drafted by", ...names.map((each) => nameOf(each)));
}

// -- scrolling ------------------------------------------------------------------------------------

function fromEnd() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight;
}

/** Scroll to the end if the reader is following it. */
function scroll() {
  const log = $("log");
  if (isFollowing) log.scrollTop = log.scrollHeight;
  lastTop = log.scrollTop;
  $("down").hidden = isFollowing || fromEnd() < NEAR_PX;
}

function follow() {
  isFollowing = true;
  scroll();
}

/** Update whether the reader follows the end. Any scrolling up ends it, even by a few pixels. */
function scrolled() {
  const top = $("log").scrollTop, left = fromEnd();
  if (left < AT_END_PX) isFollowing = true;
  else if (top < lastTop) isFollowing = false;
  else if (left < NEAR_PX) isFollowing = true;
  lastTop = top;
  $("down").hidden = isFollowing || left < NEAR_PX;
}

// -- errors ---------------------------------------------------------------------------------------

/** Show an error at the input, or a field for a missing API key. @param {unknown} error */
function showAlert(error) {
  const needsKey = error instanceof Refused && error.status === 401;
  const { message } = /** @type {Error} */ (error);
  const close = make("button", { type: "button", click: hideAlert }, "Close");
  $("alert").replaceChildren(...(needsKey ? [keyForm()] : [make("span", {}, message), close]));
  $("alert").hidden = false;
}

function keyForm() {
  const input = make("input", { type: "password", id: "key", autocomplete: "off" });
  const label = make("label", { for: "key" }, "This server needs an API key");
  const form = make("form", {}, label, input, make("button", { class: "dark" }, "Use this key"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(input.value);
    hideAlert();
    loadModel();
    watch(latestId);
    $("text").focus();
  });
  return form;
}

function hideAlert() {
  $("alert").hidden = true;
}

// -- answers --------------------------------------------------------------------------------------

/** @returns {Mode} */
const mode = () => /** @type {Mode} */ (
  /** @type {HTMLInputElement} */ (document.querySelector("input[name=mode]:checked")).value);

/**
 * Return the body of a request, with the token ids of earlier answers if they are known.
 * @param {Conversation} conversation
 * @param {Mode} how
 */
function bodyOf({ messages, system, settings }, how) {
  const sent = messages.filter((each) => !isAnswer(each) || each.isDone).map((each) => {
    const { role, content } = each;
    if (!isAnswer(each) || !each.ids) return { role, content };
    const thought = each.reasoning ? { reasoning_content: each.reasoning } : {};
    return { role, content, token_ids: each.ids, ...thought };
  });
  const before = system.trim() ? [{ role: "system", content: system }] : [];
  const body = { messages: [...before, ...sent], ...settings };
  if (how === "off") return { ...body, speculation: "off" };
  if (how === "on") return body;
  const seed = settings.seed ?? Math.floor(Math.random() * MAX_SEED);
  return { ...body, seed, cache: { read: false, write: false } };
}

/**
 * Request an answer to the last message.
 * @param {(conversation: Conversation) => void} restore restores the messages if no token arrived
 */
async function answerLast(restore) {
  const mine = chat, how = mode(), body = bodyOf(mine, how), control = new AbortController();
  const answer = blank(how === "off" ? "off" : "on");
  if (how === "both") {
    answer.isPrivate = true;
    answer.other = { ...blank("off"), isPrivate: true };
  }
  running = control;
  mine.messages.push(answer);
  begin();
  try {
    await runAll(mine, answer, body, control.signal);
    $("status").textContent = answer.finish === "stopped" ? "Stopped."
      : `The answer is complete: ${count(tokensOf(answer.pieces).length, "token")}.`;
  } catch (error) {
    if (answer.pieces.length) answer.error = /** @type {Error} */ (error).message;
    else restore(mine);
    if (!answer.error && mine === chat) showAlert(error);
    $("status").textContent = "";
  }
  end(mine, answer, control);
}

function begin() {
  hideAlert();
  showBusy(true);
  drawLog();
  follow();
  $("status").textContent = "The model is answering.";
}

/**
 * Stream an answer, and then the second one if they are shown side by side.
 * @param {Conversation} mine
 * @param {Answer} answer
 * @param {{messages: object[]}} body
 * @param {AbortSignal} signal
 */
async function runAll(mine, answer, body, signal) {
  const shown = views.slice(answer.other ? -2 : -1);
  const changed = (/** @type {View} */ view) => () => { if (mine === chat) view.changed(); };
  await run(answer, body, signal, changed(shown[0]));
  if (!answer.other || answer.finish === "stopped") return;
  const plain = { ...body, speculation: "off" };
  await run(answer.other, plain, signal, changed(shown[1]));
}

/**
 * @param {Conversation} mine
 * @param {Answer} answer
 * @param {AbortController} control
 */
function end(mine, { other }, control) {
  if (other && !other.isDone) {
    Object.assign(other, { isDone: true, finish: "stopped", ms: { first: 0, last: 0, total: 0 } });
  }
  if (running === control) {
    running = null;
    showBusy(false);
  }
  try {
    save(mine);
  } catch (error) {
    showAlert(error);
  }
  if (mine !== chat) return;
  drawLog();
  scroll();
}

/** @param {boolean} isBusy */
function showBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("log").setAttribute("aria-busy", String(isBusy));
}

/**
 * Send a message that replaces the one at `index` and all later ones.
 * @param {string} text
 * @param {number} index
 */
function send(text, index = chat.messages.length) {
  if (running) return;
  const before = chat.messages;
  chat.messages = [...before.slice(0, index), { role: "user", content: text }];
  answerLast((mine) => {
    mine.messages = before;
    if (mine !== chat) return;
    write(text);
    $("text").focus();
  });
}

function regenerate() {
  if (running) return;
  const before = chat.messages;
  chat.messages = before.slice(0, -1);
  answerLast((mine) => { mine.messages = before; });
}

function stop() {
  running?.abort();
}

// -- the keyboard and the buttons -----------------------------------------------------------------

/** @param {KeyboardEvent} event */
const isEnter = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

/** @param {string} text */
function write(text) {
  field("text").value = text;
  grow();
}

/** Adjust the height of the input to its text. */
function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight}px`;
}

function submit() {
  const text = field("text").value.trim();
  if (!text || running) return;
  write("");
  send(text);
}

/** Open or close the engine panel on small screens. @param {boolean} isOpen */
function sheet(isOpen) {
  $("engine").classList.toggle("open", isOpen);
  $("open-engine").setAttribute("aria-expanded", String(isOpen));
  $(isOpen ? "close-engine" : "open-engine").focus();
}

const isSheetOpen = () => $("engine").classList.contains("open");

function listenToTheMessage() {
  $("text").addEventListener("input", grow);
  $("text").addEventListener("keydown", (event) => {
    if (!isEnter(event)) return;
    event.preventDefault();
    /** @type {HTMLFormElement} */ ($("form")).requestSubmit();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  $("stop").addEventListener("click", stop);
}

function listenToTheLog() {
  $("colours").addEventListener("change", () => { for (const view of views) view.redraw(); });
  $("log").addEventListener("scroll", scrolled);
  $("log").addEventListener("wheel", (event) => {
    if (event.deltaY < 0) isFollowing = false;
  }, { passive: true });
  $("down").addEventListener("click", () => {
    follow();
    $("text").focus();
  });
}

function listenToTheRest() {
  $("history").addEventListener("beforetoggle", () => drawHistory(chat, open));
  $("new").addEventListener("click", () => open(fresh()));
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("input", readSettings);
  $("open-engine").addEventListener("click", () => sheet(!isSheetOpen()));
  $("close-engine").addEventListener("click", () => sheet(false));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector(":popover-open")) return;
    if (isSheetOpen()) sheet(false);
    else stop();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) unwatch();
    else watch(latestId);
  });
}

listenToTheMessage();
listenToTheLog();
listenToTheRest();
open(lastOpen());
loadModel();
watch(latestId);
