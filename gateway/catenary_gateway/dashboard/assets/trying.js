// The try-it box: which model, with which key, and what may be asked of it.

import { storedKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, h, keyed, text } from "./dom.js";
import { labelOf } from "./format.js";
import { Picture, pictureInput } from "./picture.js";

const KINDS = { chat: "chat", picture: "picture", tensors: "tensors" };

export class Trying {
  constructor(onDetails) {
    this.offers = [];
    this.chosen = "";
    const how = {
      keyOf: () => byId("try-key").value.trim() || storedKey(),
      onRefused: (problem) => this.refused(problem),
      onDetails,
    };
    this.chat = new Chat(how);
    this.picture = new Picture(how);
    byId("try-model").addEventListener("change", () => this.choose());
  }

  show({ models, needs_key: needsKey }) {
    this.needsKey = needsKey;
    byId("try-key-line").hidden = !needsKey;
    this.offers = models;
    const order = Object.keys(KINDS);
    const sorted = [...models].sort(
      (a, b) => b.ready - a.ready || order.indexOf(kindOf(a)) - order.indexOf(kindOf(b)) || labelOf(a).localeCompare(labelOf(b)),
    );
    const choice = byId("try-model");
    keyed(choice, sorted, labelOf, (offer) => h("option", { value: labelOf(offer) }), (option, offer) => {
      text(option, `${labelOf(offer)} (${KINDS[kindOf(offer)]}${offer.ready ? "" : ", not ready"})`);
    });
    byId("try-none").hidden = models.length > 0;
    choice.parentElement.hidden = models.length === 0;
    // Whoever has chosen keeps the choice; else the best one that has come by now is asked.
    const known = sorted.some((offer) => labelOf(offer) === this.chosen);
    if (!known && sorted.length) choice.value = labelOf(sorted[0]);
    this.choose();
  }

  choose() {
    const label = byId("try-model").value;
    const offer = this.offers.find((each) => labelOf(each) === label);
    if (offer && label === this.chosen) {
      // Its tokenizer may have come meanwhile.
      if (kindOf(offer) === "chat") this.chat.offer = offer;
      return;
    }
    this.chosen = offer ? label : "";
    const kind = offer ? kindOf(offer) : "";
    byId("chat").hidden = kind !== "chat";
    if (kind !== "chat") byId("chat-new").hidden = true;
    byId("picture").hidden = kind !== "picture";
    byId("try-tensors").hidden = kind !== "tensors";
    if (kind === "chat") this.chat.begin(offer);
    else if (kind === "picture") this.picture.begin(offer);
    else if (offer) this.describe(offer);
  }

  describe(offer) {
    const inputs = offer.inputs.map(({ name, datatype, shape }) => `${name}: ${datatype} [${shape.join(", ")}]`);
    const flags = offer.inputs.map(({ name }) => `--input ${name}=FILE.npy`);
    text(byId("try-inputs"), inputs.join("; ") || "nothing that is known yet");
    text(byId("try-command"), `catenary infer ${[offer.name, ...flags].join(" ")}`);
  }

  refused(problem) {
    if (![401, 403].includes(problem.status) || !this.needsKey) return;
    byId("try-key-line").open = true;
    byId("try-key").focus();
  }
}

function kindOf(offer) {
  if (offer.generates) return "chat";
  return pictureInput(offer) ? "picture" : "tensors";
}
