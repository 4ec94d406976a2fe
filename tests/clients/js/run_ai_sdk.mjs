// The Vercel AI SDK with its three providers: OpenAI-compatible, OpenAI (Responses), Anthropic.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, LONG, MODEL, PREFIX, URL, call, check, expect, refusal, run, say } from "./harness.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

// docs: begin
const compatible = createOpenAICompatible({
  name: "foretoken",
  baseURL: `${URL}/v1`,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY }); // by Responses
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY });
const model = compatible(MODEL);
// docs: end
const PARIS = call("get_weather", { city: "Paris" });
const tools = {
  get_weather: tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => say(`Sunny in ${city}.`),
  }),
};
const Person = z.object({ name: z.string(), age: z.number().int() });
const loop = { tools, stopWhen: stepCountIs(3), prompt: say(PARIS) };

/** The whole of a stream; its errors are thrown, not logged. */
async function streamed(options) {
  let failure;
  const result = streamText({ ...options, onError: ({ error }) => (failure = error) });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  if (failure) throw failure;
  return { text, usage: await result.totalUsage, steps: await result.steps };
}

/** Plain text, whole and as a stream, with its usage. */
async function speaks(of) {
  const { text } = await generateText({ model: of, prompt: say("Hello!") });
  expect(text, "Hello!");
  const stream = await streamed({ model: of, prompt: say("Bit by bit.") });
  expect(stream.text, "Bit by bit.");
  check(stream.usage.outputTokens > 0 && stream.usage.outputTokens < 20, stream.usage);
}

/** Call, run, tell, answer: whole and as a stream. */
async function loops(of) {
  const { text, steps } = await generateText({ model: of, ...loop });
  expect([text, steps.length], ["Sunny in Paris.", 2]);
  const stream = await streamed({ model: of, ...loop });
  expect([stream.text, stream.steps.length], ["Sunny in Paris.", 2]);
}

await run(["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"], {
  chat: () => speaks(model),

  async "cached tokens"() {
    await generateText({ model, prompt: PREFIX + say("Noted.") });
    const { usage } = await generateText({ model, prompt: PREFIX + say("Noted.") });
    check(usage.inputTokenDetails.cacheReadTokens > 200, usage);
  },

  "tool loop": () => loops(model),

  async "forced tool"() {
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const { toolCalls } = await generateText({ model, tools, toolChoice, prompt: say(PARIS) });
    expect(toolCalls[0].input, { city: "Paris" });
  },

  async "structured output"() {
    const output = Output.object({ schema: Person });
    const answer = await generateText({ model, output, prompt: say('{"name":"Ada","age":36}') });
    expect(answer.output, { name: "Ada", age: 36 });
  },

  async reasoning() {
    const answer = await generateText({ model, prompt: say("<think>Hm.</think>Yes.") });
    expect([answer.reasoningText.trim(), answer.text], ["Hm.", "Yes."]);
  },

  async stop() {
    const { text } = await generateText({ model, prompt: say("One. Two."), stopSequences: ["Two"] });
    expect(text, "One. ");
  },

  async "text completions"() {
    const completing = compatible.completionModel(MODEL);
    const { text } = await generateText({ model: completing, prompt: "[[Go on.]]", maxOutputTokens: 20 });
    expect(text, "Go on.");
  },

  async errors() {
    const error = await refusal(generateText({ model, prompt: LONG, maxRetries: 0 }));
    check(error.message.includes("prompt is too long"), error.message);
    expect(error.statusCode, 400);
  },

  responses: () => speaks(openai(MODEL)),
  "responses tool loop": () => loops(openai(MODEL)),
  "anthropic messages": () => speaks(anthropic(MODEL)),
  "anthropic tool loop": () => loops(anthropic(MODEL)),

  async "anthropic compaction"() {
    const trigger = { type: "input_tokens", value: 200 };
    const edits = [{ type: "compact_20260112", trigger, instructions: "[[A house with rules.]]" }];
    const providerOptions = { anthropic: { contextManagement: { edits } } };
    const messages = [
      { role: "user", content: PREFIX },
      { role: "assistant", content: "Noted." },
      { role: "user", content: say("Go on.") },
    ];
    const options = { model: anthropic(MODEL), providerOptions };
    const answer = await generateText({ ...options, messages });
    check(answer.text.endsWith("Go on."), answer.text);
    const applied = answer.providerMetadata.anthropic.contextManagement.appliedEdits;
    expect(applied.map((edit) => edit.type), ["compact_20260112"]);
    const stream = await streamed({ ...options, messages });
    check(stream.text.endsWith("Go on."), stream.text);
    // This client sends a compaction block without its seal.
    const later = [...messages, ...answer.response.messages, { role: "user", content: say("And on.") }];
    expect((await generateText({ ...options, messages: later })).text, "And on.");
  },
});
