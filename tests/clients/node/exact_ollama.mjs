// ollama: chats, prompts, streams, tools, forms, thinking, vectors, models, errors.
import { Ollama } from "ollama";
import { assert, CALL, check, CITY, model, PARIS, tell, url } from "./checks.mjs";

const client = new Ollama({ host: url });
const parameters = { type: "object", properties: { rank: { type: "integer" } }, required: ["rank"] };
const tools = [{ type: "function", function: { name: "rate", description: "Rate.", parameters } }];
const say = (text, more = {}) => ({ model, messages: [{ role: "user", content: `say:${text}` }], ...more });

await check("chat", async () => {
  const found = await client.chat(say("Hello"));
  assert.equal(found.message.content, "Hello");
  assert.deepEqual([found.done, found.done_reason, found.eval_count], [true, "stop", 6]);
});
await check("stream", async () => {
  let text = "";
  let last;
  for await (const part of await client.chat(say("Hello", { stream: true }))) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, "Hello");
  assert.equal(last.done, true);
});
await check("aborted stream", async () => {
  const own = new Ollama({ host: url });
  const stream = await own.chat({ model, messages: [{ role: "user", content: "hang:x" }], stream: true });
  await assert.rejects(async () => {
    for await (const _ of stream) own.abort();
  }, { name: "AbortError" });
});
await check("generate", async () => {
  assert.equal((await client.generate({ model, prompt: "say:Hello", system: "Be brief." })).response, "Hello");
  assert.equal((await client.generate({ model, prompt: "say:Hello", raw: true })).response, "Hello");
});
await check("options", async () => {
  const found = await client.chat(say("Hello", { options: { num_predict: 2, num_thread: 4 }, keep_alive: "5m" }));
  assert.deepEqual([found.message.content, found.done_reason], ["He", "length"]);
});
await check("tools", async () => {
  const asked = say(CALL, { tools });
  const { message } = await client.chat(asked);
  assert.deepEqual(message.tool_calls[0].function.arguments, { rank: 7 });
  const messages = [...asked.messages, message, { role: "tool", tool_name: "rate", content: "say:7" }];
  assert.equal((await client.chat({ model, messages, tools })).message.content, "7");
});
await check("form", async () => {
  const format = { type: "object", properties: { name: { type: "string" }, rank: { type: "integer" } } };
  assert.deepEqual(JSON.parse((await client.chat(say(CITY, { format }))).message.content), PARIS);
});
await check("thinking", async () => {
  const { message } = await client.chat(say("<think>Hm.</think>Yes.", { think: true }));
  assert.deepEqual([message.thinking, message.content], ["Hm.", "Yes."]);
});
await check("vectors", async () => {
  const { embeddings } = await client.embed({ model, input: ["ab", "c"] });
  assert.equal(embeddings.length, 2);
  assert.deepEqual((await client.embeddings({ model, prompt: "ab" })).embedding, embeddings[0]);
});
await check("models", async () => {
  assert.equal((await client.list()).models[0].name, model);
  assert.equal((await client.ps()).models[0].name, model);
  assert.ok((await client.show({ model })).capabilities.includes("tools"));
  assert.ok((await client.version()).version);
});
await check("errors", async () => {
  await assert.rejects(client.chat({ ...say("x"), model: "other" }), { status_code: 404 });
  await assert.rejects(client.pull({ model: "other" }), { status_code: 501 });
  await assert.rejects(client.delete({ model }), { status_code: 501 });
});

tell();
