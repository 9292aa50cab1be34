// @ts-check
// The chat: conversations at the side, messages, settings, the line to write in.

import { key } from "./api.js";
import { button, copy, h, notice } from "./dom.js";
import { empty, generate } from "./generate.js";
import { messageView, resultForm } from "./messages.js";
import { isObject, panel } from "./panel.js";
import * as pictures from "./pictures.js";
import { asCurl, asPython, body } from "./request.js";
import * as store from "./store.js";

const NEAR_END_PX = 80;

/** @typedef {{name: string, sees: boolean}} Model */

/** @param {Model} model @returns {import("./main.js").View} */
export function chatView(model) {
  const chat = new Chat(model);
  return { element: chat.element, start: () => chat.started(), stop: () => {} };
}

class Chat {
  /** @param {Model} model */
  constructor(model) {
    this.model = model;
    /** @type {AbortController | null} */
    this.running = null;
    this.conversation = store.all()[0] ?? store.fresh();
    /** For the next message. @type {pictures.Picture[]} */
    this.attached = [];
    /** Pictures that are being read. @type {Promise<unknown>} */
    this.reading = Promise.resolve();
    pictures.sweep(store.all);
    this.list = h("ul", { class: "conversations" });
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation" });
    this.aside = h("aside", { class: "side left", "aria-label": "Conversations" }, button("Start a new conversation", "+ New conversation", () => this.open(store.fresh()), { class: "new" }), this.list);
    this.options = h("aside", { class: "side right", id: "options", "aria-label": "Settings" });
    this.input = h("textarea", { id: "prompt", rows: 1, placeholder: "Write a message", "aria-label": "Message" });
    this.thumbnails = h("ul", { class: "attached pictures", "aria-label": "Attached pictures", "aria-live": "polite" });
    const files = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true });
    files.addEventListener("change", () => {
      this.attach([...files.files]);
      files.value = ""; // so that the same file can be attached again
    });
    const attach = button("Attach pictures", "+", () => files.click(), { class: "attach", id: "attach" });
    this.send = button("Send", "Send", () => this.ask(), { class: "primary", id: "send" });
    this.halt = button("Stop the answer", "Stop", () => this.running?.abort(), { class: "stop", id: "stop" });
    this.halt.hidden = true;
    const toggles = h("div", { class: "toggles" }, this.toggle("Conversations", "left", "\u2630"), this.toggle("Settings", "right", "\u2699"));
    const composer = h("div", { class: "composer" }, attach, files, this.input, this.send, this.halt);
    this.element = h("section", { class: "chat", "aria-label": "Chat" }, this.aside, h("div", { class: "middle" }, toggles, this.log, this.thumbnails, composer), this.options);
    this.input.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.ask();
      }
    });
    this.input.addEventListener("input", () => this.grow());
    this.takePictures();
    this.element.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    addEventListener("pagehide", () => this.left());
    this.draw();
  }

  /** What has come of an answer is kept when the page is left or loaded again; it says that there was more. */
  left() {
    if (!this.running) return;
    for (const one of this.conversation.messages.at(-1)?.answers ?? []) {
      if (!one.finish) one.error ??= "The page was left before the end of the answer.";
    }
    this.keep();
  }

  started() {
    this.input.focus({ preventScroll: true });
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** @param {string} label @param {"left" | "right"} side @param {string} sign */
  toggle(label, side, sign) {
    const wide = matchMedia("(min-width: 62rem)").matches;
    const found = button(`Show or hide: ${label}`, `${sign} ${label}`, () => set(!this.element.classList.contains(side)), { id: `toggle-${side}` });
    const set = (/** @type {boolean} */ on) => {
      this.element.classList.toggle(side, on);
      found.setAttribute("aria-expanded", String(on));
    };
    queueMicrotask(() => set(wide));
    return found;
  }

  /** By paste, and by drag and drop. */
  takePictures() {
    const over = (/** @type {DragEvent} */ event, /** @type {boolean} */ is) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      this.element.classList.toggle("dropping", is && this.model.sees);
    };
    this.element.addEventListener("dragover", (/** @type {DragEvent} */ event) => over(event, true));
    this.element.addEventListener("dragleave", (/** @type {DragEvent} */ event) => over(event, false));
    this.element.addEventListener("drop", (/** @type {DragEvent} */ event) => {
      over(event, false);
      this.attach([...(event.dataTransfer?.files ?? [])]);
    });
    this.input.addEventListener("paste", (/** @type {ClipboardEvent} */ event) => {
      if (event.clipboardData?.types.includes("text/plain")) return; // a table's cells come as a picture, too
      this.attach([...(event.clipboardData?.files ?? [])]);
    });
  }

  /** @param {File[]} files */
  attach(files) {
    if (files.length && !this.model.sees) return notice(`${this.model.name || "The model"} does not see pictures.`);
    for (const file of files) {
      const done = (/** @type {pictures.Picture} */ one) => this.drawAttached([...this.attached, one]);
      const failed = () => notice(`${file.name}: this browser cannot read it as a picture.`);
      this.reading = this.reading.then(() => pictures.read(file)).then(done, failed);
    }
    this.input.focus({ preventScroll: true });
  }

  /** @param {pictures.Picture[]} attached */
  drawAttached(attached) {
    this.attached = attached;
    this.thumbnails.replaceChildren(...attached.map((one) => {
      const remove = button(`Remove: ${one.name}`, "\u00D7", () => {
        this.drawAttached(this.attached.filter((other) => other !== one));
        this.input.focus();
      });
      return h("li", {}, pictures.view(one), remove);
    }));
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 240)}px`;
  }

  /** @param {store.Conversation} conversation */
  open(conversation) {
    this.running?.abort();
    this.conversation = conversation;
    this.draw();
    this.started();
  }

  keep() {
    if (!this.conversation.title) this.conversation.title = (this.conversation.messages[0]?.text ?? "").trim().slice(0, 60);
    const gone = store.keep(this.conversation);
    if (gone) notice(`This browser's room is full: ${gone} old conversations went.`);
    pictures.keep(this.conversation);
    this.drawList();
  }

  draw() {
    const { conversation } = this;
    this.reading = this.reading.then(() => pictures.load(conversation)).then((some) => {
      if (some && conversation === this.conversation && !this.running) this.drawLog();
    });
    this.drawList();
    this.options.replaceChildren(panel(this.conversation.settings, () => this.conversation.messages.length && store.keep(this.conversation)));
    this.drawLog();
  }

  drawList() {
    this.list.replaceChildren(...store.all().map((one) => {
      const open = h("button", { type: "button", class: "open", "aria-current": one.id === this.conversation.id ? "true" : null, onclick: () => this.open(one) }, one.title || "untitled");
      const remove = button(`Delete: ${one.title}`, "\u00D7", () => {
        store.remove(one.id);
        pictures.sweep(store.all);
        if (one.id === this.conversation.id) this.open(store.all()[0] ?? store.fresh());
        else this.drawList();
      }, { class: "quiet" });
      return h("li", {}, open, remove);
    }));
  }

  drawLog() {
    const { messages } = this.conversation;
    const actions = {
      edit: (/** @type {number} */ index, /** @type {string} */ text) => this.from(index, { ...messages[index], text }),
      again: (/** @type {number} */ index) => this.from(index),
      choose: (/** @type {number} */ index, /** @type {number} */ which) => {
        messages[index].chosen = which;
        this.keep();
      },
      copyAs: (/** @type {number} */ index, /** @type {number} */ which, /** @type {string} */ kind) => {
        const before = { ...this.conversation, messages: messages.slice(0, index) };
        copy((kind === "curl" ? asCurl : asPython)(body(before, this.model.name, which), key() !== null));
      },
      results: (/** @type {store.Message[]} */ all) => this.from(messages.length, ...all),
    };
    const parts = messages.map((one, index) => messageView(one, index, actions));
    this.views = parts.at(-1)?.views ?? [];
    const last = messages.at(-1);
    const form = last?.role === "assistant" && !this.running ? resultForm(last, actions) : null;
    const start = h("div", { class: "start" }, h("h1", {}, "What do you want to ask?"), h("p", {}, "Enter sends, Shift+Enter begins a new line, Escape stops an answer. Conversations stay in this browser."));
    this.log.replaceChildren(...(messages.length ? [...parts.map((one) => one.element), ...(form ? [form] : [])] : [start]));
    this.send.hidden = this.running !== null;
    this.halt.hidden = this.running === null;
  }

  async ask() {
    await this.reading;
    const text = this.input.value.trim();
    if (this.running) {
      if (text) notice("The answer is still coming. Send this after it, or stop it with Escape.");
      return;
    }
    if (!text && !this.attached.length) return;
    const seen = this.attached.length ? { pictures: this.attached } : {};
    this.input.value = "";
    this.grow();
    this.drawAttached([]);
    this.from(this.conversation.messages.length, { role: "user", text, ...seen });
  }

  /** Go on from a place: what came after it goes. @param {number} index @param {store.Message[]} added */
  async from(index, ...added) {
    const { conversation } = this;
    await this.reading;
    if (this.running || conversation !== this.conversation) return;
    const { settings, messages } = conversation;
    if (!isObject(settings.extra)) {
      notice("Settings: the further fields are no JSON object.");
      return;
    }
    messages.length = index;
    messages.push(...added);
    const answers = settings.compare ? [empty(), empty()] : [empty()];
    const bodies = answers.map((_, which) => body(conversation, this.model.name, which));
    messages.push({ role: "assistant", text: "", answers, chosen: 0 });
    this.answer(conversation, answers, bodies);
  }

  /** @param {store.Conversation} conversation @param {store.Answer[]} answers @param {any[]} bodies */
  async answer(conversation, answers, bodies) {
    const running = (this.running = new AbortController());
    this.drawLog();
    this.keep();
    const views = this.views ?? [];
    this.log.scrollTop = this.log.scrollHeight;
    views.forEach((view) => view.begin());
    await Promise.all(answers.map(async (answer, i) => {
      await generate(bodies[i], answer, running.signal, () => {
        views[i].changed();
        this.follow();
      });
      views[i].end();
    }));
    this.running = null;
    if (conversation === this.conversation) {
      const follows = this.nearEnd();
      this.send.hidden = false;
      this.halt.hidden = true;
      if (answers.some((one) => one.calls.length)) this.drawLog();
      this.keep();
      if (follows) this.log.scrollTop = this.log.scrollHeight;
      this.input.focus({ preventScroll: true });
    } else {
      if (store.has(conversation.id)) store.keep(conversation); // it may have been deleted meanwhile
      this.drawLog();
    }
  }

  nearEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
  }

  /** Stay at the end, unless the reader has gone up; once a frame. */
  follow() {
    if (this.following || !this.nearEnd()) return;
    this.following = requestAnimationFrame(() => requestAnimationFrame(() => {
      this.following = 0;
      this.log.scrollTop = this.log.scrollHeight;
    }));
  }
}
