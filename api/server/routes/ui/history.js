/** Conversations, which are stored only in this browser. */

import { $, make } from "./dom.js";

/** @typedef {import("./answer.js").Answer} Answer */
/** @typedef {{role: "user", content: string}} Question */
/** @typedef {Question | Answer} Message */
/**
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {string} system the system prompt
 * @property {Message[]} messages
 * @property {number} updated milliseconds since 1970
 * @property {Record<string, number>} settings fields of the request
 */

const PREFIX = "foretoken.chat.", SETTINGS = "foretoken.settings", OPEN = "foretoken.open";
const TITLE_CHARS = 80;
const MINUTE_MS = 60_000, HOUR_MINUTES = 60, DAY_MINUTES = 1440;

/** Return an empty conversation with the last used settings. @returns {Conversation} */
export const fresh = () => ({
  id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`,
  title: "", system: "", messages: [], updated: 0,
  settings: JSON.parse(localStorage.getItem(SETTINGS) ?? "{}"),
});

/** @param {Record<string, number>} settings */
export const keepSettings = (settings) =>
  localStorage.setItem(SETTINGS, JSON.stringify(settings));

/** Return all stored conversations, the latest first. @returns {Conversation[]} */
const saved = () => Object.keys(localStorage).filter((key) => key.startsWith(PREFIX))
  .map((key) => JSON.parse(localStorage.getItem(key) ?? ""))
  .sort((one, other) => other.updated - one.updated);

/** Return the conversation that was open before a reload, or a new one. */
export const lastOpen = () =>
  saved().find((each) => each.id === sessionStorage.getItem(OPEN)) ?? fresh();

/** @param {Conversation} conversation */
export const keepOpen = (conversation) => sessionStorage.setItem(OPEN, conversation.id);

/**
 * Store a conversation, and delete the oldest ones if there is no room. Throws if it is too long.
 * @param {Conversation} conversation
 */
export function save(conversation) {
  if (!conversation.messages.length) return;
  const [line] = conversation.messages[0].content.trim().split("\n");
  conversation.title = line.slice(0, TITLE_CHARS);
  conversation.updated = Date.now();
  const text = JSON.stringify(conversation);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + conversation.id, text);
      return;
    } catch { // The browser's storage is full.
      const oldest = saved().filter((each) => each.id !== conversation.id).pop();
      if (!oldest) throw new Error("this conversation is too long to store in the browser");
      localStorage.removeItem(PREFIX + oldest.id);
    }
  }
}

/** @param {number} time */
function ago(time) {
  const minutes = Math.round((Date.now() - time) / MINUTE_MS);
  if (minutes < 1) return "now";
  if (minutes < HOUR_MINUTES) return `${minutes} min`;
  if (minutes < DAY_MINUTES) return `${Math.round(minutes / HOUR_MINUTES)} h`;
  return new Date(time).toLocaleDateString();
}

/**
 * Make a button that deletes a conversation when it is pressed twice.
 * @param {Conversation} conversation
 * @param {() => void} deleted
 */
function deleteButton(conversation, deleted) {
  const { id, title } = conversation;
  const button = make("button", { type: "button", "aria-label": `Delete ${title}` }, "Delete");
  let isAsked = false;
  button.addEventListener("click", () => {
    if (!isAsked) {
      isAsked = true;
      button.textContent = "Sure?";
      button.setAttribute("aria-label", `Sure? Delete ${title}`);
      $("status").textContent = `Sure? Press again to delete ${title}.`;
      return;
    }
    localStorage.removeItem(PREFIX + id);
    $("status").textContent = `Deleted ${title}.`;
    deleted();
  });
  return button;
}

/**
 * List the conversations.
 * @param {Conversation} current
 * @param {(conversation: Conversation) => void} open
 */
export function drawHistory(current, open) {
  const rows = saved().map((each) => {
    const isCurrent = each.id === current.id;
    const name = make("button", {
      type: "button", title: each.title, "aria-current": isCurrent ? "true" : undefined,
      click: () => {
        $("history").hidePopover();
        open(each);
      },
    }, each.title);
    const remove = deleteButton(each, () => {
      const next = isCurrent ? fresh() : current;
      if (isCurrent) open(next);
      drawHistory(next, open);
    });
    return make("div", {}, name, make("span", { class: "small num" }, ago(each.updated)), remove);
  });
  const words = "tored only in this browser.";
  const about = rows.length ? `S${words}` : `No conversations yet. They are s${words}`;
  $("history").replaceChildren(...rows, make("p", { class: "small" }, about));
}
