/** Helpers that every part of the page uses to make nodes and format values. */

/** @typedef {Node | string} Child */
/** @typedef {Child | Child[]} Children */
/** @typedef {Record<string, unknown>} Attributes functions are listeners; false is omitted */

const SVG = "http://www.w3.org/2000/svg";
const COPIED_MS = 1500;

/**
 * Return the element with this id. Throws if the page lacks it.
 * @param {string} id
 */
export function $(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * Return the input element with this id.
 * @param {string} id
 */
export const field = (id) => /** @type {HTMLInputElement} */ ($(id));

/**
 * Append nodes one by one, because the number of arguments of a call is limited.
 * @param {Element} element
 * @param {Child[]} children
 */
export function fill(element, children) {
  for (const child of children) element.append(child);
}

/**
 * @template {Element} E
 * @param {E} element
 * @param {Attributes} attributes
 * @param {Children[]} children
 * @returns {E}
 */
function put(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      element.addEventListener(key, /** @type {EventListener} */ (value));
    } else if (value !== false && value !== undefined) {
      element.setAttribute(key, String(value));
    }
  }
  fill(element, children.flat());
  return element;
}

/**
 * Make an element of HTML.
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name
 * @param {Attributes} attributes
 * @param {...Children} children
 */
export const make = (name, attributes = {}, ...children) =>
  put(document.createElement(name), attributes, children);

/**
 * Make an element of SVG.
 * @template {keyof SVGElementTagNameMap} Name
 * @param {Name} name
 * @param {Attributes} attributes
 * @param {...Children} children
 */
export const draw = (name, attributes = {}, ...children) =>
  put(document.createElementNS(SVG, name), attributes, children);

/** @param {number[]} numbers */
export const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);

/** @param {number} share */
export const percent = (share) => `${(100 * share).toFixed(0)}%`;

/**
 * Format a number with its noun, such as "1 token" and "2 tokens".
 * @param {number} number
 * @param {string} noun
 */
export const count = (number, noun) =>
  `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/**
 * Make a button that copies the text that `textOf` returns when it is pressed.
 * @param {() => string} textOf
 */
export function copyButton(textOf) {
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    await toClipboard(textOf());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, COPIED_MS);
  });
  return button;
}

/** @param {string} text */
async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // Without a secure context, browsers can still copy a selection.
    const area = make("textarea", { class: "sr" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
