// The ollama client for JavaScript.

import { Ollama } from "ollama";
import { KEY, LONG, MODEL, URL, WEATHER, call, check, expect, refusal, run, say } from "./harness.mjs";

// docs: begin
const client = new Ollama({ host: URL, headers: { authorization: "Bearer " + KEY } });
// docs: end
const PARIS = call("get_weather", { city: "Paris" });
const fn = { name: "get_weather", description: "Weather of a city", parameters: WEATHER };
const tool = { type: "function", function: fn };
const user = (content) => [{ role: "user", content }];
const chat = (text, more) => client.chat({ model: MODEL, messages: user(text), ...more });

await run(["ollama"], {
  async chat() {
    const answer = await chat(say("Hello, wörld!"), { options: { temperature: 0 } });
    expect([answer.message.content, answer.done_reason], ["Hello, wörld!", "stop"]);
    check(answer.eval_count > 1, answer);
  },

  async stream() {
    let [text, last] = ["", null];
    for await (const part of await chat(say("Bit by bit."), { stream: true })) {
      text += part.message.content;
      last = part;
    }
    expect([text, last.done], ["Bit by bit.", true]);
  },

  async generate() {
    const { response } = await client.generate({ model: MODEL, prompt: say("As asked.") });
    expect(response, "As asked.");
  },

  async "tool loop"() {
    const first = await chat(say(PARIS), { tools: [tool] });
    const [found] = first.message.tool_calls;
    expect(found.function, { name: "get_weather", arguments: { city: "Paris" } });
    const result = { role: "tool", tool_name: "get_weather", content: say("Sunny in Paris.") };
    const messages = [...user(say(PARIS)), first.message, result];
    const last = await client.chat({ model: MODEL, messages, tools: [tool] });
    expect(last.message.content, "Sunny in Paris.");
  },

  async "structured output"() {
    const { message } = await chat(say('{"city": "Rome"}'), { format: WEATHER });
    expect(JSON.parse(message.content), { city: "Rome" });
  },

  async thinking() {
    const { message } = await chat(say("<think>Hm.</think>Yes."));
    expect([message.thinking.trim(), message.content.trim()], ["Hm.", "Yes."]);
  },

  async abort() {
    const stream = await chat(say("Long ".repeat(200)), { stream: true });
    const work = (async () => {
      for await (const _ of stream) stream.abort();
    })();
    expect((await refusal(work)).name, "AbortError");
  },

  async "list and show"() {
    const { models } = await client.list();
    expect(models.map((each) => each.model), [MODEL]);
    const { capabilities } = await client.show({ model: MODEL });
    check(capabilities.includes("completion"), capabilities);
  },

  async errors() {
    const wrong = await refusal(chat("x", { options: { top_p: 2 } }));
    check(wrong.message.includes("top_p"), wrong.message);
    const missing = await refusal(client.show({ model: "missing" }));
    expect(missing.status_code, 404);
    const long = await refusal(chat(LONG));
    check(long.message.includes("prompt is too long"), long.message);
  },
});
