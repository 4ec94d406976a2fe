/** The content of an empty conversation: the purpose of the page, and examples to send. */

import { make } from "./dom.js";

const CODE = `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def __len__(self):
        return len(self.items)
`;
const OBJECT = `{
  "service": "orders",
  "host": "127.0.0.1",
  "port": 8000,
  "timeout_seconds": 30,
  "database": {
    "driver": "postgres",
    "name": "orders",
    "pool_size": 10
  },
  "features": {
    "search": true,
    "export": false
  }
}
`;
const RENAME = "Rename the class `Stack` to `Pile` and answer with the whole code only.";
const CHANGE = "Set the port to 9000 in this JSON and answer with the whole JSON only.";
const EXAMPLES = [
  ["Write a class", "Write a Python class `Stack` with push and pop.",
    "New text: few tokens are drafted."],
  ["Rename it", `${RENAME}\n\n\`\`\`python\n${CODE}\`\`\``,
    "An edit repeats its input: most tokens are drafted."],
  ["Change some JSON", `${CHANGE}\n\n\`\`\`json\n${OBJECT}\`\`\``,
    "Agents repeat JSON in this way: most tokens are drafted."],
];

/**
 * @param {string} model
 * @param {(text: string) => void} send
 */
export function welcome(model, send) {
  const drafted = make("mark", { class: "by-1" }, "Coloured text");
  const examples = EXAMPLES.map(([title, text, why]) => make("button",
    { type: "button", click: () => send(text) }, make("b", {}, title), make("span", {}, why)));
  return make("div", { class: "welcome" },
    make("div", {}, make("h2", {}, `Chat with ${model} and see which tokens were drafted.`),
      make("p", {}, drafted, " was drafted and then verified by the model, several tokens in " +
        "one step. Plain text took the model one step per token. The answer is the same with and " +
        "without drafts.")),
    make("div", { class: "examples" }, ...examples));
}
