// Vercel's AI SDK over each API of the server: texts, objects, tools, thoughts, embeddings, errors; reasons exact.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, embedMany, generateObject, generateText, NoObjectGeneratedError, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { assert, CALL, check, CITY, model, PARIS, tell, url } from "./checks.mjs";

const schema = z.object({ name: z.string(), rank: z.number().int() });
const compatible = createOpenAICompatible({ name: "minisgl", baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
const models = { compatible: compatible.chatModel(model), chat: openai.chat(model), responses: openai.responses(model), messages: anthropic(model) };
const fail = { onError: ({ error }) => { throw error; } };

for (const [name, one] of Object.entries(models)) {
  const say = (text) => ({ model: one, maxRetries: 0, maxOutputTokens: 300, prompt: `say:${text}` });
  const rated = [];
  const rate = tool({ description: "Rate.", inputSchema: z.object({ rank: z.number().int() }), execute: async ({ rank }) => { rated.push(rank); return "say:done"; } });
  await check(`${name}: text`, async () => {
    const found = await generateText({ ...say("Hello"), system: "Be brief.", temperature: 0.5, topP: 0.5 });
    assert.equal(found.text, "Hello");
    assert.equal(found.finishReason, "stop");
    assert.equal(found.usage.outputTokens, 6);
  });
  await check(`${name}: limit`, async () => {
    const found = await generateText({ ...say("Hello Hello Hello Hello"), maxOutputTokens: 16 });
    assert.equal(found.text, "Hello Hello Hell");
    assert.equal(found.finishReason, "length");
  });
  await check(`${name}: stream`, async () => {
    const stream = streamText({ ...say("Hello"), ...fail });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, "Hello");
    assert.equal(await stream.finishReason, "stop");
    assert.equal((await stream.usage).outputTokens, 6);
  });
  await check(`${name}: object`, async () => {
    const found = await generateObject({ ...say(CITY), schema });
    assert.deepEqual(found.object, PARIS);
    assert.equal(found.finishReason, "stop");
  });
  await check(`${name}: streamed object`, async () => {
    const stream = streamObject({ ...say(CITY), schema, ...fail });
    let partials = 0;
    for await (const _ of stream.partialObjectStream) partials += 1;
    assert.deepEqual(await stream.object, PARIS);
    assert.ok(partials > 0);
  });
  await check(`${name}: array, enum, output`, async () => {
    const array = await generateObject({ ...say(`{"elements": [${CITY}]}`), schema, output: "array" });
    assert.deepEqual(array.object, [PARIS]);
    const word = await generateObject({ ...say('{"result": "large"}'), output: "enum", enum: ["small", "large"] });
    assert.equal(word.object, "large");
    const found = await generateText({ ...say(CITY), output: Output.object({ schema }) });
    assert.deepEqual(found.output, PARIS);
  });
  await check(`${name}: no object`, async () => {
    await assert.rejects(generateObject({ ...say("no JSON"), schema }), (error) => NoObjectGeneratedError.isInstance(error));
  });
  for (const toolChoice of ["auto", "required"]) {
    await check(`${name}: call, ${toolChoice}`, async () => {
      const found = await generateText({ ...say(CALL), tools: { rate }, toolChoice });
      assert.deepEqual(found.toolCalls.map((call) => [call.toolName, call.input]), [["rate", { rank: 7 }]]);
      assert.equal(found.finishReason, "tool-calls");
    });
  }
  await check(`${name}: named tool`, async () => {
    const found = await generateText({ ...say(CALL), tools: { rate }, toolChoice: { type: "tool", toolName: "rate" } });
    assert.equal(found.toolCalls.length, 1);
  });
  await check(`${name}: steps`, async () => {
    const found = await generateText({ ...say(CALL), tools: { rate }, stopWhen: stepCountIs(3) });
    assert.equal(found.text, "done");
    assert.deepEqual(found.steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
  });
  await check(`${name}: streamed steps`, async () => {
    const kinds = [];
    const stream = streamText({ ...say(CALL), tools: { rate }, stopWhen: stepCountIs(3), ...fail });
    for await (const part of stream.fullStream) if (kinds.at(-1) !== part.type) kinds.push(part.type);
    assert.equal(await stream.text, "done");
    assert.deepEqual(kinds.filter((kind) => ["tool-input-start", "tool-call", "tool-result", "finish-step", "text-delta", "finish"].includes(kind)), ["tool-input-start", "tool-call", "tool-result", "finish-step", "text-delta", "finish-step", "finish"]);
    assert.deepEqual((await stream.steps).map((step) => step.finishReason), ["tool-calls", "stop"]);
  });
  await check(`${name}: thoughts`, async () => {
    const found = await generateText(say("<think>Hm.</think>Yes"));
    assert.equal(found.text, "Yes");
    // those of /v1/responses are summed up for this client, and nothing is summed up here; its chat provider shows none
    if (name === "compatible" || name === "messages") assert.equal(found.reasoningText, "Hm.");
  });
  await check(`${name}: talk`, async () => {
    const messages = [{ role: "user", content: "Hi" }, { role: "assistant", content: "Hello." }, { role: "user", content: [{ type: "text", text: "say:yes" }] }];
    assert.equal((await generateText({ model: one, messages, maxRetries: 0 })).text, "yes");
  });
  await check(`${name}: errors`, async () => {
    // its provider for Anthropic cuts temperatures to what that API takes
    if (name !== "messages") await assert.rejects(generateText({ ...say("x"), temperature: 9 }), (error) => APICallError.isInstance(error) && error.statusCode === 400);
    await assert.rejects(generateText({ model: one, maxRetries: 0, prompt: "fail:" }), (error) => APICallError.isInstance(error) && error.statusCode === 500);
    await assert.rejects(generateText({ model: one, maxRetries: 0, prompt: "hang:x", abortSignal: AbortSignal.timeout(200) }));
  });
}
for (const [name, one] of Object.entries({ compatible: compatible.embeddingModel(model), openai: openai.embedding(model) })) {
  await check(`${name}: embeddings`, async () => {
    assert.equal((await embed({ model: one, value: "abcd" })).embedding.length, 4);
    assert.equal((await embedMany({ model: one, values: ["abcd", "bcde"] })).embeddings.length, 2);
  });
}
for (const [name, one] of Object.entries({ compatible: compatible.completionModel(model), openai: openai.completion(model) })) {
  await check(`${name}: completion`, async () => {
    assert.match((await generateText({ model: one, prompt: "say:Hello", maxRetries: 0 })).text, /^Hello/);
  });
}
tell();
