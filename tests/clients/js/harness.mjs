// What the scripts of the clients share; the counterpart of ../harness.py.

import { readFileSync, writeSync } from "node:fs";

export const URL = process.env.FORETOKEN_URL ?? "http://127.0.0.1:8000"; // of tests/support/scripted_server.py
export const SEEING_URL = process.env.FORETOKEN_SEEING_URL ?? "http://127.0.0.1:8001"; // of a tiny random model that sees images
export const MODEL = "foretoken-builtin";
export const SEEING = "seeing"; // the name of that other model
export const KEY = "sk-local"; // that server's --api-key

export const WEATHER = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const LONG = "All work and no play makes a prompt too long. ".repeat(1000);
// Pictures of 8 x 8 pixels, PNG in base64.
export const RED =
  "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEUlEQVR42mP4z8CAFTEMLQkAKP8/wc53yE8AAAAASUVORK5CYII=";
export const BLUE =
  "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEElEQVR42mNgYPiPAw0pCQCpcD/B/MtF/AAAAABJRU5ErkJggg==";
export const PREFIX = Array.from({ length: 40 }, (_, i) => `Rule ${i} of the house holds.`).join(" ");

/** A message that the scripted server answers so. */
export const say = (answer) => `Please answer. [[${answer}]]`;

/** What the model writes to call a tool. */
export const call = (name, args) =>
  `<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;

/** Equal as JSON, or an error that shows both. */
export function expect(got, wanted, what = "answer") {
  const [left, right] = [got, wanted].map((value) => JSON.stringify(value));
  if (left !== right) throw new Error(`${what}: got ${left}, wanted ${right}`);
}

/** A truth, or an error that shows what there was instead. */
export function check(truth, what) {
  if (!truth) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

let numLooks = 0;

/**
 * Pictures reach the model as so many tokens, and the cache keeps them apart. `look` asks about a picture with a text
 * behind it, and gives the answer, the tokens of the image and those of the prompt that were cached.
 */
export async function checkSight(look, numTokens = 4) {
  const who = process.argv[1].split("/").at(-1);
  const text = `Look well at this picture, then name its colour, ${who} ${(numLooks += 1)}.`; // a new prompt
  const [first, again, other] = [await look(RED, text), await look(RED, text), await look(BLUE, text)];
  expect([first[1], again[1], other[1]], [numTokens, numTokens, numTokens], "tokens of the image");
  expect(again[0], first[0], "the answer about the same picture");
  check(again[2] > other[2], [again, other]);
}

/** What `work` is refused with. */
export async function refusal(work) {
  try {
    await work;
  } catch (error) {
    return error;
  }
  throw new Error("there was no error");
}

/** Print the versions, then how each feature went: one JSON object a line. */
export async function run(packages, features) {
  const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
  tell({ versions });
  for (const [feature, show] of Object.entries(features)) {
    const began = performance.now();
    let detail = "";
    try {
      await show();
    } catch (error) {
      detail = `${error?.name}: ${error?.message}`.slice(0, 2000);
    }
    const seconds = Math.round(performance.now() - began) / 1000;
    tell({ feature, ok: !detail, detail, seconds });
  }
}

const tell = (row) => writeSync(1, `${JSON.stringify(row)}\n`);

function version(name) {
  const file = new globalThis.URL(`node_modules/${name}/package.json`, import.meta.url);
  return JSON.parse(readFileSync(file, "utf8")).version;
}
