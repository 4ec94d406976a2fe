/** The API viewer: all routes of openapi.json, with fields and an example for each. */

import { $, field, make } from "./dom.js";

/**
 * @typedef {object} Schema the keywords of JSON schema that openapi.json uses
 * @property {string} [$ref]
 * @property {string} [type]
 * @property {Schema[]} [anyOf]
 * @property {Schema[]} [oneOf]
 * @property {unknown[]} [enum]
 * @property {unknown} [const]
 * @property {Schema} [items]
 * @property {Record<string, Schema>} [properties]
 * @property {string[]} [required]
 */
/** @typedef {Record<string, {schema: Schema}>} Content schemas by media type */
/** @typedef {{name: string, in: string, schema: Schema, required?: boolean}} Parameter */
/**
 * @typedef {object} Operation
 * @property {string} summary
 * @property {Parameter[]} [parameters]
 * @property {{content: Content}} [requestBody]
 * @property {Record<string, {description: string, content: Content}>} responses
 */
/** @typedef {Record<string, Record<string, Operation>>} Paths operations by path and method */

/** @type {[title: string, pattern: RegExp][]} */
const GROUPS = [
  ["Chat and completions", /^\/v1\/(chat|completions)/],
  ["Responses", /^\/v1\/responses/],
  ["Messages (Anthropic)", /^\/v1\/messages/],
  ["Gemini", /^\/v1beta/],
  ["Ollama", /^\/api\//],
  ["Vectors and scores", /^\/(v[12]\/)?(embeddings|rerank|score)/],
  ["Files and batches", /^\/v1\/(files|batches)/],
  ["Models and tokens", /^\/(v1\/models|tokenize|detokenize)/],
  ["Prefix cache", /^\/cache/],
  ["Operation", /./],
];
const QUESTION = "What is the capital of France?";
/** @type {Record<string, unknown>} */
const SAMPLES = {
  messages: [{ role: "user", content: QUESTION }], prompt: "Once upon a time", input: QUESTION,
  tokens: [1, 2, 3], max_tokens: 32,
};
const PROMPTS = ["messages", "prompt", "input"];
const LIMITS = [
  ["exclusiveMinimum", "above"], ["minimum", "from"], ["maximum", "to"],
  ["maxLength", "characters up to"], ["maxItems", "items up to"],
];
const MAX_DEPTH = 6; // Schemas may contain themselves.
const HUGE = 2 ** 31 - 1; // Limits from here on belong to the data type, not to the field.
const JSON_TYPE = "application/json";

/** @type {Record<string, Schema>} */
let schemas = {};

/** @param {string} text */
const dim = (text) => make("span", { class: "dim" }, text);

/** @param {Schema} schema */
const choices = (schema) => schema.anyOf ?? schema.oneOf ?? [schema];

/** @param {Schema} schema */
const resolve = ({ $ref, ...schema }) => $ref ? schemas[$ref.split("/").pop() ?? ""] ?? {} : schema;

/**
 * @param {Schema} schema
 * @returns {string}
 */
function typeOf(schema) {
  const names = choices(schema).filter((each) => each.type !== "null").map((each) => {
    if (each.$ref) return each.$ref.split(/[./]/).pop();
    if (each.enum) return each.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (each.const !== undefined) return JSON.stringify(each.const);
    if (each.type === "array") return `list of ${typeOf(each.items ?? {})}`;
    return each.type ?? "any";
  });
  return [...new Set(names)].join(" | ");
}

/** @param {Schema} schema */
function limits(schema) {
  return choices(schema).flatMap((each) => {
    const numbers = /** @type {Record<string, number>} */ (/** @type {unknown} */ (each));
    return LIMITS.filter(([name]) => Math.abs(numbers[name]) < HUGE)
      .map(([name, word]) => `${word} ${numbers[name]}`);
  }).join(" ");
}

/**
 * Return the object schemas that a value may have or contain.
 * @param {Schema} schema
 * @returns {Schema[]}
 */
function objectsIn(schema) {
  return choices(schema).flatMap((each) => {
    const known = resolve(each);
    if (known.anyOf || known.oneOf) return objectsIn(known);
    if (known.type === "array") return objectsIn(known.items ?? {});
    return known.properties ? [known] : [];
  });
}

/**
 * @param {string} name
 * @param {Schema} schema
 * @param {boolean | undefined} isRequired
 */
function line(name, schema, isRequired) {
  const bounds = limits(schema);
  return make("span", {},
    make("code", {}, name), " ", make("span", { class: "type" }, typeOf(schema)),
    ...(bounds ? [dim(`, ${bounds}`)] : []),
    ...(isRequired ? [" ", make("strong", {}, "required")] : []));
}

/**
 * List an object's fields; the fields of a field are listed when it is opened.
 * @param {Schema} schema
 * @returns {HTMLElement}
 */
function fields(schema, depth = 0) {
  const items = objectsIn(schema).flatMap(({ properties = {}, required = [] }) => {
    const isNeeded = (/** @type {string} */ name) => required.includes(name);
    const sorted = Object.entries(properties)
      .sort(([one], [other]) => Number(isNeeded(other)) - Number(isNeeded(one)));
    return sorted.map(([name, each]) => {
      const head = line(name, each, isNeeded(name));
      if (!objectsIn(each).length || depth >= MAX_DEPTH) return make("li", {}, head);
      return make("li", {}, opening("", [head], () => fields(each, depth + 1)));
    });
  });
  return make("ul", {}, ...items);
}

/**
 * Make a summary whose content is created when it is first opened.
 * @param {string} name the CSS class
 * @param {Node[]} summary
 * @param {() => Node} content
 */
function opening(name, summary, content) {
  const box = make("details", { class: name }, make("summary", {}, ...summary));
  box.addEventListener("toggle", () => box.append(content()), { once: true });
  return box;
}

/** Return a body with the required fields and a prompt. @param {Schema} schema */
function sample(schema) {
  const [object] = objectsIn(schema);
  if (!object) return {};
  const { properties = {}, required = [] } = object, names = new Set(required);
  const prompt = PROMPTS.find((name) => name in properties);
  if (prompt && !PROMPTS.some((name) => names.has(name))) names.add(prompt);
  if ("max_tokens" in properties) names.add("max_tokens");
  return Object.fromEntries([...names].map((name) => [name, SAMPLES[name] ?? null]));
}

/**
 * @param {string} path
 * @param {string} method
 * @param {Operation} operation
 */
function curl(path, method, operation) {
  const json = operation.requestBody?.content[JSON_TYPE];
  const verb = !json && method !== "get" ? ` -X ${method.toUpperCase()}` : "";
  const parts = [`curl ${location.origin}${path}${verb}`];
  if (field("key").value) parts.push('-H "Authorization: Bearer $KEY"');
  if (json) parts.push(`--json '${JSON.stringify(sample(json.schema))}'`);
  return parts.join(" \\\n  ");
}

/** @param {Parameter} parameter */
const parameterItem = ({ name, schema, required, in: place }) =>
  make("li", {}, line(name, schema, required), " ", dim(`in the ${place}`));

/**
 * @param {string} path
 * @param {string} method
 * @param {Operation} operation
 */
function details(path, method, operation) {
  const box = make("div");
  const add = (/** @type {string} */ title, /** @type {Node} */ node) =>
    box.append(make("h3", {}, title), node);
  const { parameters, requestBody, responses } = operation;
  add("Example", make("pre", {}, curl(path, method, operation)));
  if (parameters) add("Parameters", make("ul", {}, ...parameters.map(parameterItem)));
  const body = requestBody?.content[JSON_TYPE];
  if (body) add("Body", fields(body.schema));
  for (const [media, { schema }] of Object.entries(responses["200"].content)) {
    const isObject = objectsIn(schema).length > 0;
    const type = make("p", { class: "type" }, typeOf(schema));
    add(`Answer, ${media}`, isObject ? fields(schema) : type);
  }
  const errors = Object.entries(responses).filter(([status]) => status !== "200")
    .map(([status, { description }]) => make("li", {}, `${status}  ${description}`));
  add("Errors", make("ul", {}, ...errors));
  return box;
}

/**
 * @param {string} path
 * @param {Record<string, Operation>} operations
 */
const routesOf = (path, operations) => Object.entries(operations).map(([method, operation]) =>
  opening("route", [
    make("span", { class: "verb" }, method.toUpperCase()),
    make("span", { class: "path" }, path),
    dim(operation.summary),
  ], () => details(path, method, operation)));

/** @param {{paths: Paths, info: {version: string}, components: {schemas: typeof schemas}}} api */
function show({ paths, info, components }) {
  schemas = components.schemas;
  $("routes").replaceChildren();
  let left = Object.entries(paths);
  for (const [title, pattern] of GROUPS) {
    const mine = left.filter(([path]) => pattern.test(path));
    left = left.filter(([path]) => !pattern.test(path));
    if (!mine.length) continue;
    const routes = mine.flatMap(([path, operations]) => routesOf(path, operations));
    $("routes").append(make("h2", {}, title), ...routes);
  }
  $("about").replaceChildren(`foretoken ${info.version}, described by `,
    make("a", { href: "openapi.json" }, "openapi.json"),
    ". Unknown fields are ignored.");
}

async function read() {
  const key = field("key").value;
  const headers = key ? { authorization: `Bearer ${key}` } : undefined;
  const answer = await fetch("openapi.json", { headers });
  $("keys").hidden = answer.ok;
  if (answer.ok) show(await answer.json());
  else $("about").textContent = (await answer.json()).error.message;
}

$("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  read();
});
read().catch((error) => { $("about").textContent = String(error); });
