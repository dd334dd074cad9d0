// An operator's orders. The gateway tells which there are; each is asked twice before it is given.

import { send } from "./api.js";
import { sentence } from "./chat.js";
import { byId, h, keyed, text } from "./dom.js";
import { byName } from "./format.js";

const URL = "dashboard/v1/actions";
const LOCKED_AFTER_MS = 15 * 60e3;
const MOST_SHOWN = 20;
const FIELDS = { agent_id: "Agent", model: "Model", version: "Version" };
const title = (name) => `${name[0].toUpperCase()}${name.slice(1)}`;
const pathOf = (name) => `${URL}/${encodeURIComponent(name)}`;

export class Orders {
  constructor(onChange) {
    this.onChange = onChange;
    this.key = ""; // never stored: whoever loads the page anew enters it again
    this.actions = {};
    this.agents = [];
    this.timer = 0;
    this.step = 0;
    this.asked = null;
    byId("orders-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.unlock(byId("orders-key").value.trim());
    });
    byId("orders-lock").addEventListener("click", () => this.lock());
    byId("order-back").addEventListener("click", () => byId("order").close());
    byId("order-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.confirm();
    });
  }

  /** The names of the orders that take this one field only; none while locked. */
  about(field) {
    return Object.keys(this.actions).filter((name) => this.actions[name].required.join() === field);
  }

  know(status) {
    this.agents = status.agents.map((agent) => agent.agent_id).sort(byName);
    for (const select of byId("orders-list").querySelectorAll("select")) options(select, this.agents);
  }

  async unlock(key) {
    byId("orders-key").value = "";
    text(byId("orders-problem"), "");
    try {
      const response = await send(URL, { method: "GET", key });
      this.actions = (await response.json()).actions;
      this.key = key;
    } catch (problem) {
      text(byId("orders-problem"), sentence(problem.message));
      return;
    }
    this.rest();
    this.show();
    byId("orders-lock").focus();
  }

  lock() {
    clearTimeout(this.timer);
    this.key = "";
    this.actions = {};
    if (byId("order").open) byId("order").close();
    this.show();
  }

  /** Locks after a while without an order. */
  rest() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.lock(), LOCKED_AFTER_MS);
  }

  show() {
    const names = Object.keys(this.actions);
    byId("orders-form").hidden = names.length > 0;
    byId("orders-open").hidden = names.length === 0;
    keyed(byId("orders-list"), names, (name) => name, (name) => this.makeForm(name), () => {});
    this.onChange();
  }

  makeForm(name) {
    const { effect, required, optional } = this.actions[name];
    const inputs = new Map();
    const labels = [...required, ...optional].map((field) => {
      const input = field === "agent_id" ? options(h("select", null), this.agents) : h("input", { type: "text", maxlength: 128, autocomplete: "off", spellcheck: "false" });
      input.required = required.includes(field);
      inputs.set(field, input);
      return h("label", null, `${FIELDS[field] || field}${input.required ? "" : " (optional)"} `, input);
    });
    const form = h("form", { class: "card" }, h("h3", null, title(name)), h("p", { class: "note" }, effect), ...labels, h("button", { type: "submit" }, `${title(name)} …`));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = [...inputs].map(([field, input]) => [field, input.value.trim()]);
      this.ask(name, Object.fromEntries(given.filter(([, value]) => value)));
    });
    return form;
  }

  /** Asks for the first time. */
  ask(name, given) {
    this.asked = { name, given, words: [name, ...Object.values(given)].join(" ") };
    this.step = 1;
    text(byId("order-title"), `${title(this.asked.words)}?`);
    text(byId("order-effect"), this.actions[name].effect);
    text(byId("order-on"), "Go on");
    byId("order").showModal();
    byId("order-back").focus();
  }

  /** Asks for the second time, and then gives the order. */
  confirm() {
    if (this.step === 1) {
      this.step = 2;
      text(byId("order-title"), "Are you sure?");
      text(byId("order-effect"), `This changes the running cluster: ${this.asked.words}.`);
      text(byId("order-on"), `Yes, ${this.asked.words}`);
      byId("order-back").focus();
      return;
    }
    byId("order").close();
    this.give(this.asked);
  }

  async give({ name, given, words }) {
    this.rest();
    const line = h("li", null);
    const says = (outcome) => text(line, `${new Date().toLocaleTimeString()} ${words}: ${outcome}`);
    says("under way …");
    byId("orders-log").prepend(line);
    while (byId("orders-log").childElementCount > MOST_SHOWN) byId("orders-log").lastElementChild.remove();
    try {
      const response = await send(pathOf(name), {
        key: this.key,
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(given),
      });
      says(outcomeOf(await response.json()));
    } catch (problem) {
      line.className = "problem";
      says(problem.message);
    }
  }
}

function outcomeOf(answer) {
  if (answer.drained === false) return "some of its work goes on; it gets none any more";
  if (answer.changed === false) return `done: ${answer.plan_id} stays in force`;
  return answer.plan_id ? `done: ${answer.plan_id} is in force` : "done";
}

function options(select, names) {
  keyed(select, names, (name) => name, (name) => h("option", { value: name }, name), () => {});
  return select;
}
