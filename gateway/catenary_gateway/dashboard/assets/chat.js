// A conversation with a language model. What it says is set as text, never as markup.

import { send } from "./api.js";
import { byId, h } from "./dom.js";
import { digits, duration } from "./format.js";

const MOST_SHOWN = 100;

export class Chat {
  /** `keyOf()` returns the key to send; `onRefused(problem)` hears of a key that is not enough. */
  constructor({ keyOf, onRefused, onDetails }) {
    this.keyOf = keyOf;
    this.onRefused = onRefused;
    this.onDetails = onDetails;
    this.offer = null;
    this.said = [];
    this.stop = null;
    this.log = byId("chat-log");
    this.words = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say();
    });
    this.words.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.say();
    });
    byId("chat-stop").addEventListener("click", () => this.stop && this.stop.abort());
    byId("chat-new").addEventListener("click", () => this.begin(this.offer));
    for (const button of document.querySelectorAll("#chat-ideas button")) {
      button.addEventListener("click", () => {
        this.words.value = button.textContent;
        this.say();
      });
    }
  }

  /** Begins a new conversation, with the model of an offer. */
  begin(offer) {
    if (this.stop) this.stop.abort();
    this.offer = offer;
    this.said = [];
    this.log.replaceChildren();
    byId("chat-ideas").hidden = false;
    byId("chat-new").hidden = true;
  }

  async say() {
    const asked = this.words.value.trim();
    if (!asked || this.stop) return;
    this.words.value = "";
    byId("chat-ideas").hidden = true;
    byId("chat-new").hidden = false;
    this.show("You", "asked").textContent = asked;
    this.said.push({ role: "user", content: asked });
    const answer = this.show(this.offer.name, "answer");
    const figures = h("p", { class: "note" }, "waiting for the first word …");
    answer.after(figures);
    const stop = new AbortController();
    this.stop = stop;
    this.busy(true);
    let text = "";
    try {
      text = await this.stream(stop.signal, answer, figures);
    } catch (problem) {
      text = answer.textContent;
      figures.textContent = stop.signal.aborted ? "Stopped." : sentence(problem.message);
      if (!stop.signal.aborted) {
        figures.className = "problem";
        this.onRefused(problem);
      }
    }
    this.stop = null;
    this.busy(false);
    // A question without an answer is not part of what the model is told next.
    if (text) this.said.push({ role: "assistant", content: text });
    else this.said.pop();
    this.follow(true);
  }

  /** Writes an answer as it comes, and returns all of it. */
  async stream(signal, answer, figures) {
    const chats = this.offer.chats !== false;
    const begun = performance.now();
    const response = await send(chats ? "v1/chat/completions" : "v1/completions", {
      key: this.keyOf(),
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: `${this.offer.name}:${this.offer.version}`,
        ...(chats ? { messages: this.said } : { prompt: this.said.at(-1).content }),
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number(byId("chat-most").value) || 200,
        temperature: Number(byId("chat-temperature").value) || 0,
      }),
      signal,
    });
    const words = answer.appendChild(document.createTextNode(""));
    let firstMs = 0;
    let tokens = 0;
    let finish = "";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message || "the answer broke off");
      const choice = event.choices && event.choices[0];
      const piece = (choice && (chats ? choice.delta && choice.delta.content : choice.text)) || "";
      if (piece) {
        if (!firstMs) {
          firstMs = performance.now() - begun;
          figures.textContent = `first word after ${duration(firstMs * 1e6)}`;
        }
        const follows = this.atEnd();
        words.appendData(piece);
        this.follow(follows);
      }
      if (choice && choice.finish_reason) finish = choice.finish_reason;
      if (event.usage) tokens = event.usage.completion_tokens;
    }
    const tookS = (performance.now() - begun - firstMs) / 1000;
    const rate = tokens > 1 && tookS > 0.05 ? `, then ${digits((tokens - 1) / tookS)} tokens/s` : "";
    const cut = finish === "length" ? ", cut at the longest answer" : "";
    figures.textContent = `First word after ${duration(firstMs * 1e6)}${rate} (${tokens} tokens${cut}). `;
    const id = response.headers.get("X-Request-Id");
    if (id) figures.append(h("button", { type: "button", class: "link", onclick: () => this.onDetails(id) }, "Where the time went"));
    return words.data;
  }

  /** Adds what somebody says, and returns the element for the words. */
  show(who, kind) {
    const words = h("p", { class: "words" });
    this.log.append(h("div", { class: `said ${kind}` }, h("span", { class: "who" }, who), words));
    while (this.log.childElementCount > MOST_SHOWN) this.log.firstElementChild.remove();
    this.follow(true);
    return words;
  }

  busy(busy) {
    this.log.setAttribute("aria-busy", String(busy));
    byId("chat-send").hidden = busy;
    byId("chat-stop").hidden = !busy;
  }

  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
  }

  follow(follows) {
    if (follows) this.log.scrollTop = this.log.scrollHeight;
  }
}

/** The JSON objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

/** What went wrong, as a sentence. */
export const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}${/[.!?]$/.test(words) ? "" : "."}`;
