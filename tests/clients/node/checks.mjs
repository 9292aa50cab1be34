// Checks of a client, one for each call of its documentation; the model is scripted: what it says stands after `say:`.
import assert from "node:assert/strict";

export { assert };
export const url = process.env.MINISGL_URL;
export const model = "scripted";
export const CITY = '{"name": "Paris", "rank": 1}';
export const PARIS = { name: "Paris", rank: 1 };
export const CALL = '<tool_call>{"name": "rate", "arguments": {"rank": 7}}</tool_call>';
const found = {};

export async function check(name, work) {
  try {
    await work();
    found[name] = null;
  } catch (error) {
    found[name] = String(error?.stack ?? error).slice(0, 2000);
  }
}

export const tell = () => console.log(JSON.stringify(found));
