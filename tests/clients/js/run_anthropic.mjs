// The anthropic SDK for JavaScript: Messages.

import Anthropic from "@anthropic-ai/sdk";
import {
  KEY, LONG, MODEL, PREFIX, SEEING, SEEING_URL, URL, WEATHER, call, check, checkSight, expect, refusal, run, say,
} from "./harness.mjs";

// docs: begin
const client = new Anthropic({ baseURL: URL, apiKey: KEY });
// docs: end
const PARIS = call("get_weather", { city: "Paris" });
const tool = { name: "get_weather", description: "Weather of a city", input_schema: WEATHER };

const user = (content) => [{ role: "user", content }];
const body = (content, more) => ({ model: MODEL, max_tokens: 200, messages: user(content), ...more });
const ask = (content, more) => client.messages.create(body(content, more));

await run(["@anthropic-ai/sdk"], {
  async messages() {
    const answer = await ask(say("Hello, wörld!"), { system: "Be brief." });
    expect([answer.content[0].text, answer.stop_reason], ["Hello, wörld!", "end_turn"]);
  },

  async stream() {
    const stream = client.messages.stream(body(say("Bit by bit.")));
    let text = "";
    stream.on("text", (piece) => (text += piece));
    const final = await stream.finalMessage();
    expect([text, final.content[0].text], ["Bit by bit.", "Bit by bit."]);
    check(final.usage.output_tokens > 1, final.usage);
  },

  async "tool loop"() {
    const first = await ask(say(PARIS), { tools: [tool] });
    const used = first.content.find((block) => block.type === "tool_use");
    expect([used.name, used.input, first.stop_reason], ["get_weather", { city: "Paris" }, "tool_use"]);
    const result = { type: "tool_result", tool_use_id: used.id, content: say("Sunny.") };
    const said = { role: "assistant", content: first.content };
    const messages = [...user(say(PARIS)), said, ...user([result])];
    const second = await client.messages.create({ ...body(""), messages, tools: [tool] });
    expect(second.content[0].text, "Sunny.");
  },

  async "streamed tool calls"() {
    const stream = client.messages.stream(body(say(PARIS), { tools: [tool] }));
    let pieces = "";
    stream.on("inputJson", (piece) => (pieces += piece));
    const final = await stream.finalMessage();
    expect([JSON.parse(pieces), final.content.at(-1).input], [{ city: "Paris" }, { city: "Paris" }]);
  },

  async "count tokens"() {
    const counted = await client.messages.countTokens({ model: MODEL, messages: user("Count this.") });
    check(counted.input_tokens > 3, counted);
  },

  async "cached tokens"() {
    const system = [{ type: "text", text: PREFIX, cache_control: { type: "ephemeral" } }];
    await ask(say("Noted."), { system });
    const { usage } = await ask(say("Noted."), { system });
    check(usage.cache_read_input_tokens > 200, usage);
  },

  async compaction() {
    const said = { role: "assistant", content: "Noted." };
    const messages = [...user(PREFIX), said, ...user(say("Go on."))];
    const trigger = { type: "input_tokens", value: 200 };
    const edit = { type: "compact_20260112", trigger, instructions: "[[A house with rules.]]" };
    const options = { ...body(""), messages, context_management: { edits: [edit] } };
    const answer = await client.beta.messages.create(options);
    expect(answer.content.map((block) => block.content ?? block.text), ["A house with rules.", "Go on."]);
    const final = await client.beta.messages.stream(options).finalMessage();
    expect(final.content.map((block) => block.content ?? block.text), ["A house with rules.", "Go on."]);
    const later = [...messages, { role: "assistant", content: final.content }, ...user(say("And on."))];
    const again = await client.beta.messages.create({ ...options, messages: later });
    expect(again.content.map((block) => block.text), ["And on."]);
    const block = { ...answer.content[0], encrypted_content: "x" };
    const broken = [{ role: "assistant", content: [block] }, ...user("Hi")];
    const error = await refusal(client.beta.messages.create({ ...options, messages: broken }));
    expect(error.status, 400);
    check(error.message.includes("messages[0].content[0].encrypted_content"), error.message);
  },

  async images() {
    const seeing = client.withOptions({ baseURL: SEEING_URL });
    await checkSight(async (data, text) => {
      const source = { type: "base64", media_type: "image/png", data };
      const messages = user([{ type: "image", source }, { type: "text", text }]);
      const options = { model: SEEING, messages, max_tokens: 8, temperature: 0 };
      const { content, usage } = await seeing.messages.create(options);
      return [content[0].text, usage.image_tokens, usage.cache_read_input_tokens];
    }, 20); // in tiles: there is no detail
  },

  async errors() {
    const unknown = await refusal(ask("Hi", { model: "no-such" }));
    expect(unknown.constructor.name, "NotFoundError");
    const long = await refusal(ask(LONG));
    check(long.message.includes("prompt is too long"), long.message);
  },
});
