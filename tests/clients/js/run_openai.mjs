// The openai SDK for JavaScript: chat completions and Responses.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  KEY, LONG, MODEL, PREFIX, SEEING, SEEING_URL, URL, WEATHER, call, check, checkSight, expect, refusal, run, say,
} from "./harness.mjs";

// docs: begin
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
// docs: end
const PARIS = call("get_weather", { city: "Paris" });
const fn = { name: "get_weather", description: "Weather of a city", parameters: WEATHER };
const tool = { type: "function", function: fn };
const flatTool = { type: "function", strict: true, ...fn };
const Person = z.object({ name: z.string(), age: z.number().int() });

const user = (content) => [{ role: "user", content }];
const body = (text, more) => ({ model: MODEL, messages: user(text), ...more });
const chat = (text, more) => client.chat.completions.create(body(text, more));

await run(["openai"], {
  async chat() {
    const { choices } = await chat(say("Hello, wörld!"));
    expect([choices[0].message.content, choices[0].finish_reason], ["Hello, wörld!", "stop"]);
  },

  async stream() {
    const options = { stream: true, stream_options: { include_usage: true } };
    let [text, usage] = ["", null];
    for await (const chunk of await chat(say("Bit by bit."), options)) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    expect(text, "Bit by bit.");
    check(usage.completion_tokens > 1, usage);
  },

  async "stream helper"() {
    const stream = client.chat.completions.stream(body(say("Step by step."), { n: 2 }));
    const { choices } = await stream.finalChatCompletion();
    expect(choices.map((each) => each.message.content), ["Step by step.", "Step by step."]);
  },

  async "cached tokens"() {
    await chat(PREFIX + say("Noted."));
    const { usage } = await chat(PREFIX + say("Noted."));
    check(usage.prompt_tokens_details.cached_tokens > 200, usage);
  },

  async "tool loop"() {
    const get_weather = ({ city }) => say(`Sunny in ${city}.`);
    const runnable = { type: "function", function: { ...fn, function: get_weather, parse: JSON.parse } };
    const runner = client.chat.completions.runTools(body(say(PARIS), { tools: [runnable] }));
    expect(await runner.finalContent(), "Sunny in Paris.");
  },

  async "streamed tool calls"() {
    const stream = client.chat.completions.stream(body(say(PARIS), { tools: [tool] }));
    let pieces = "";
    stream.on("tool_calls.function.arguments.delta", (event) => (pieces += event.arguments_delta));
    const { choices } = await stream.finalChatCompletion();
    expect(JSON.parse(choices[0].message.tool_calls[0].function.arguments), { city: "Paris" });
    expect(JSON.parse(pieces), { city: "Paris" });
  },

  async "forced tool"() {
    const tool_choice = { type: "function", function: { name: "get_weather" } };
    const { choices } = await chat(say(PARIS), { tools: [tool], tool_choice });
    expect(choices[0].message.tool_calls[0].function.name, "get_weather");
  },

  async "structured output"() {
    const response_format = zodResponseFormat(Person, "person");
    const answer = await client.chat.completions.parse(
      body(say('{"name":"Ada","age":36}'), { response_format }),
    );
    expect(answer.choices[0].message.parsed, { name: "Ada", age: 36 });
  },

  async logprobs() {
    const { choices, usage } = await chat(say("Sure."), { logprobs: true, top_logprobs: 2 });
    expect(choices[0].logprobs.content.length, usage.completion_tokens);
  },

  async embeddings() {
    const input = ["One text.", "Another text."];
    const packed = await client.embeddings.create({ model: MODEL, input }); // the SDK asks for base64
    const plain = await client.embeddings.create({ model: MODEL, input, encoding_format: "float" });
    const [left, right] = [packed, plain].map(({ data }) => data.map(({ embedding }) => Array.from(embedding)));
    expect(left.map((each) => each.map(Math.fround)), right.map((each) => each.map(Math.fround)));
    check(Math.abs(right[0].reduce((sum, each) => sum + each * each, 0) - 1) < 1e-5, "length of a vector");
  },

  async images() {
    const seeing = client.withOptions({ baseURL: `${SEEING_URL}/v1` });
    await checkSight(async (png, text) => {
      const image_url = { url: `data:image/png;base64,${png}`, detail: "low" };
      const messages = user([{ type: "image_url", image_url }, { type: "text", text }]);
      const options = { model: SEEING, messages, max_tokens: 8, temperature: 0 };
      const { choices, usage } = await seeing.chat.completions.create(options);
      const { image_tokens, cached_tokens } = usage.prompt_tokens_details;
      return [choices[0].message.content, image_tokens, cached_tokens];
    });
  },

  async "responses images"() {
    const seeing = client.withOptions({ baseURL: `${SEEING_URL}/v1` });
    await checkSight(async (png, text) => {
      const image = { type: "input_image", image_url: `data:image/png;base64,${png}`, detail: "low" };
      const input = user([image, { type: "input_text", text }]);
      const options = { model: SEEING, input, max_output_tokens: 8, temperature: 0 };
      const { output_text, usage } = await seeing.responses.create(options);
      const { image_tokens, cached_tokens } = usage.input_tokens_details;
      return [output_text, image_tokens, cached_tokens];
    });
  },

  async errors() {
    const unknown = await refusal(chat("Hi", { model: "no-such" }));
    expect([unknown.constructor.name, unknown.code], ["NotFoundError", "model_not_found"]);
    const long = await refusal(chat(LONG));
    expect([long.constructor.name, long.code], ["BadRequestError", "context_length_exceeded"]);
  },

  async responses() {
    const answer = await client.responses.create({ model: MODEL, input: say("In short, yes.") });
    expect([answer.output_text, answer.status], ["In short, yes.", "completed"]);
  },

  async "responses stream"() {
    const stream = client.responses.stream({ model: MODEL, input: say("Bit by bit.") });
    expect((await stream.finalResponse()).output_text, "Bit by bit.");
  },

  async "responses compaction"() {
    const said = { role: "assistant", content: "Noted." };
    const input = [...user(PREFIX), said, ...user(say("Go on."))];
    const options = { model: MODEL, context_management: [{ type: "compaction", compact_threshold: 200 }] };
    const stream = client.responses.stream({ ...options, input });
    const final = await stream.finalResponse();
    expect([final.output.map((item) => item.type), final.output_text], [["compaction", "message"], "Go on."]);
    const later = await client.responses.create({ ...options, input: [...final.output, ...user(say("And on."))] });
    expect(later.output_text, "And on.");
    const done = await client.responses.compact({ model: MODEL, input: [...user(PREFIX), said] });
    expect(done.output.map((item) => item.type), ["message", "compaction"]);
    const broken = [{ type: "compaction", encrypted_content: "x" }, ...user("Hi")];
    const error = await refusal(client.responses.create({ ...options, input: broken }));
    expect([error.status, error.param], [400, "input[0].encrypted_content"]);
  },

  async "responses tools"() {
    const stream = client.responses.stream({ model: MODEL, input: say(PARIS), tools: [flatTool] });
    const made = (await stream.finalResponse()).output.at(-1);
    expect([made.type, JSON.parse(made.arguments)], ["function_call", { city: "Paris" }]);
    const output = { type: "function_call_output", call_id: made.call_id, output: say("Sunny.") };
    const input = [...user(say(PARIS)), made, output];
    const second = await client.responses.create({ model: MODEL, input, tools: [flatTool] });
    expect(second.output_text, "Sunny.");
  },
});
