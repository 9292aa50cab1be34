// @ts-check
// The prefix cache's tree as an icicle that lies on its side: from left to right the place in the text, so that an edge is
// as wide as it has tokens, and right of it, as high as all of them together, what goes on from there.

import { h } from "./dom.js";
import { number } from "./stream.js";

const SHOWN = 48;
const ROW_PX = 18;
const NOTHING = "Nothing is cached.";

/** @typedef {{id: number, parent: number, tokens: number, depth: number, locks: number, age: number, children: number, pinned: boolean, saved: boolean, text?: string}} Node */

/**
 * Parents before their children, the largest first; with how deep each is indented.
 * @param {Node[]} nodes
 * @returns {[Node, number][]}
 */
export function ordered(nodes) {
  const known = new Set(nodes.map((one) => one.id));
  /** @type {Map<number, Node[]>} */
  const below = new Map();
  for (const one of nodes) {
    const parent = known.has(one.parent) ? one.parent : 0;
    const others = below.get(parent);
    if (others) others.push(one);
    else below.set(parent, [one]);
  }
  /** @type {[Node, number][]} */
  const found = [];
  /** @type {[Node, number][]} */
  const open = (below.get(0) ?? []).map((one) => /** @type {[Node, number]} */ ([one, 0])).reverse();
  for (let next = open.pop(); next; next = open.pop()) {
    found.push(next);
    const [node, level] = next;
    for (const one of [...(below.get(node.id) ?? [])].reverse()) open.push([one, level + 1]);
  }
  return found;
}

/** The largest, and all that they are below of. @param {Node[]} nodes */
export function largest(nodes) {
  const byId = new Map(nodes.map((one) => [one.id, one]));
  const found = new Set(nodes.slice(0, SHOWN));
  for (const one of [...found]) {
    for (let next = byId.get(one.parent); next && !found.has(next); next = byId.get(next.parent)) found.add(next);
  }
  return nodes.filter((one) => found.has(one));
}

/**
 * Where each node lies: `from` and `to` in tokens from the start, `row` and `rows` from above. What has nothing below it
 * has a row of its own.
 * @param {Node[]} nodes
 * @returns {{node: Node, from: number, to: number, row: number, rows: number}[]}
 */
export function laidOut(nodes) {
  const order = ordered(nodes);
  const found = order.map(([node]) => ({ node, from: node.depth - node.tokens, to: node.depth, row: 0, rows: 0 }));
  let row = 0;
  /** @type {number[]} */
  const open = []; // those that the next one may be below of
  order.forEach(([, level], i) => {
    open.length = level;
    found[i].row = row;
    open.push(i);
    if ((order[i + 1]?.[1] ?? 0) > level) return;
    for (const above of open) found[above].rows += 1;
    row += 1;
  });
  return found;
}

/** @param {Node} node */
export function inWords(node) {
  const count = (/** @type {number} */ n, /** @type {string} */ one, /** @type {string} */ more) => `${number(n)} ${n === 1 ? one : more}`;
  const held = node.locks ? `held by ${count(node.locks, "request", "requests")}${node.pinned ? ", a pin among them" : ""}` : `idle: unused while ${count(node.age, "other prefix was", "other prefixes were")} released`;
  return [
    `${count(node.tokens, "token", "tokens")}, from ${number(node.depth - node.tokens)} to ${number(node.depth)} of a text`,
    held,
    node.children ? count(node.children, "branch", "branches") : "nothing goes on from here",
    node.saved && "the state at its end is kept",
  ].filter(Boolean).join("; ");
}

export class Tree {
  #about = h("p", { class: "hint" }, NOTHING);
  #nodes = h("div", { class: "icicle" });
  #axis = h("div", { class: "icicle-axis", "aria-hidden": "true" });
  #said = h("p", { class: "said-of-tree" });

  constructor() {
    const legend = h("p", { class: "legend" },
      h("span", { class: "node-held", title: "A running request reads it: it is not evicted." }, "held"),
      h("span", { class: "node-pinned", title: "A pin holds it until it is released." }, "pinned"),
      h("span", { class: "node-idle", title: "No request reads it. What was unused for longest is evicted first when pages are needed." }, "idle"),
      h("span", { class: "node-old", title: "No request reads it, and others were used since: it is evicted early." }, "idle for long"));
    this.element = h("div", { class: "tree" }, this.#about, legend, this.#nodes, this.#axis, this.#said);
  }

  /** @param {{num_nodes: number, num_tokens: number, nodes: Node[]} | null} tree null: not known yet */
  show(tree) {
    const nodes = laidOut(largest(tree?.nodes ?? []));
    const most = Math.max(1, ...nodes.map((one) => one.to));
    const oldest = Math.max(1, ...nodes.map(({ node }) => (node.locks ? 0 : node.age)));
    this.#about.textContent = tree ? `${number(tree.num_tokens)} tokens in ${number(tree.num_nodes)} pieces${tree.num_nodes > nodes.length ? `; the ${nodes.length} largest` : ""}. An edge is as wide as it has tokens; what goes on from it is right of it.` : NOTHING;
    this.#nodes.style.height = `${ROW_PX * Math.max(0, ...nodes.map((one) => one.row + one.rows))}px`;
    this.#nodes.replaceChildren(...nodes.map((one) => this.#drawn(one, most, oldest)));
    this.#axis.replaceChildren(...(nodes.length ? [0, 1 / 4, 1 / 2, 3 / 4, 1].map((share) => h("span", {}, number(Math.round(share * most)))) : []));
    this.#said.textContent = nodes.length ? "Point at an edge, or tap it, to read what it is." : "";
  }

  /** @param {ReturnType<typeof laidOut>[0]} one @param {number} most @param {number} oldest */
  #drawn({ node, from, to, row, rows }, most, oldest) {
    const kind = node.pinned ? "pinned" : node.locks ? "held" : "idle";
    const words = inWords(node);
    const found = h("button", { type: "button", class: `node node-${kind}${node.saved ? " saved" : ""}`, title: words, "aria-label": words }, node.text ?? number(node.tokens));
    found.style.left = `${(100 * from) / most}%`;
    found.style.width = `${(100 * (to - from)) / most}%`;
    found.style.top = `${row * ROW_PX}px`;
    found.style.height = `${rows * ROW_PX}px`;
    if (kind === "idle") found.style.setProperty("--fresh", `${Math.round(100 - (70 * node.age) / oldest)}%`);
    for (const event of ["pointerenter", "focus", "click"]) found.addEventListener(event, () => (this.#said.textContent = `${words}.`));
    return found;
  }
}
