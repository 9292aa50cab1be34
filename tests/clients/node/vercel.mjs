// Vercel's AI SDK over each API of the server: objects, tools that are called and answered, streams.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.MINISGL_URL;
const schema = z.object({ name: z.string().max(20), size: z.enum(["small", "large"]), rank: z.number().int().min(0).max(99) });
const providers = {
  compatible: createOpenAICompatible({ name: "minisgl", baseURL: `${url}/v1`, supportsStructuredOutputs: true }).chatModel("smollm2"),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" }).responses("smollm2"),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("smollm2"),
};
// of several calls the small model makes too many
const alone = { minisgl: { parallel_tool_calls: false }, openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } };
const found = {};
for (const [name, model] of Object.entries(providers)) {
  const asked = { model, temperature: 0, maxOutputTokens: 200, maxRetries: 0, providerOptions: alone, prompt: "Tell me about Paris." };
  const rated = [];
  const rate = tool({
    description: "Rate a city.",
    inputSchema: z.object({ rank: z.number().int().min(0).max(99) }),
    execute: async ({ rank }) => { rated.push(rank); return { ok: true }; },
  });
  const one = (found[name] = {});
  one.text = (await generateText(asked)).text;
  one.object = (await generateObject({ ...asked, schema })).object;
  const growing = streamObject({ ...asked, schema });
  one.partials = 0;
  for await (const _ of growing.partialObjectStream) one.partials += 1;
  one.streamedObject = await growing.object;
  const called = await generateText({ ...asked, tools: { rate }, toolChoice: "required" });
  one.calls = called.toolCalls.map((call) => ({ name: call.toolName, input: call.input }));
  one.finishReason = called.finishReason;
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const stream = streamText({ ...asked, tools: { rate }, prepareStep, stopWhen: stepCountIs(2), onError: ({ error }) => { throw error; } });
  one.kinds = [];
  for await (const part of stream.fullStream) if (!one.kinds.includes(part.type)) one.kinds.push(part.type);
  one.steps = (await stream.steps).length;
  one.streamedText = await stream.text;
  one.rated = rated;
}
console.log(JSON.stringify(found));
