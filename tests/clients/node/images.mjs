// Clients of Node show the model a picture: `images.mjs NAME FILE`. Prints how many tokens each prompt with it had.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const [name, file] = process.argv.slice(2);
const url = process.env.MINISGL_URL;
const data = readFileSync(file);
const base64 = data.toString("base64");
const before = "Look at this picture.";
const asked = { role: "user", content: "Look at the screen." };

async function vercel() {
  const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "minisgl", baseURL: `${url}/v1` });
  const messages = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("seer");
  const ask = async (model, messages, more) =>
    (await generateText({ model, messages, maxOutputTokens: 16, maxRetries: 0, ...more })).usage.inputTokens;
  const shown = [{ role: "user", content: [{ type: "text", text: before }, { type: "image", image: data }] }];
  const counts = [];
  for (const model of [compatible.chatModel("seer"), openai.chat("seer"), openai.responses("seer"), messages]) counts.push(await ask(model, shown));
  // As JSON the providers of chats put the picture into the text of a result of a tool: those of the other APIs show it.
  const call = { type: "tool-call", toolCallId: "call_1", toolName: "screenshot", input: {} };
  const output = { type: "content", value: [{ type: "image-data", data: base64, mediaType: "image/png" }] };
  const result = { type: "tool-result", toolCallId: "call_1", toolName: "screenshot", output };
  const talk = [asked, { role: "assistant", content: [call] }, { role: "tool", content: [result] }];
  const tools = { screenshot: tool({ description: "Take a picture of the screen.", inputSchema: z.object({}) }) };
  for (const model of [openai.responses("seer"), messages]) counts.push(await ask(model, talk, { tools }));
  return counts;
}

async function openai_node() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const image_url = `data:image/png;base64,${base64}`;
  const parts = [{ type: "text", text: before }, { type: "image_url", image_url: { url: image_url } }];
  const chat = await client.chat.completions.create({ model: "seer", max_tokens: 8, messages: [{ role: "user", content: parts }] });
  const call = { type: "function_call", call_id: "call_1", name: "screenshot", arguments: "{}" };
  const result = { type: "function_call_output", call_id: "call_1", output: [{ type: "input_image", image_url }] };
  const response = await client.responses.create({ model: "seer", max_output_tokens: 16, input: [asked, call, result] });
  return [chat.usage.prompt_tokens, response.usage.input_tokens];
}

async function ollama_js() {
  const client = new Ollama({ host: url });
  const more = { model: "seer", options: { num_predict: 8 } };
  const counts = [];
  for (const image of [file, new Uint8Array(data), base64]) {
    counts.push((await client.chat({ ...more, messages: [{ role: "user", content: before, images: [image] }] })).prompt_eval_count);
  }
  counts.push((await client.generate({ ...more, prompt: before, images: [base64] })).prompt_eval_count);
  return counts;
}

console.log(JSON.stringify(await { vercel, openai_node, ollama_js }[name]()));
