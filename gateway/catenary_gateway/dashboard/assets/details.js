// The dialog with what is known of one request or session.

import { byId, h } from "./dom.js";

export class Details {
  constructor() {
    this.dialog = byId("details");
    this.opened = 0;
    byId("details-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  /** Opens the dialog; `make` returns a promise of the elements in it. */
  async open(title, make) {
    const number = ++this.opened;
    byId("details-title").textContent = title;
    byId("details-body").replaceChildren(h("p", { class: "note" }, "Asking the gateway …"));
    if (!this.dialog.open) this.dialog.showModal();
    let elements;
    try {
      elements = await make();
    } catch (problem) {
      elements = [h("p", { class: "empty", role: "alert" }, problem.message)];
    }
    if (number === this.opened) byId("details-body").replaceChildren(...elements);
  }
}
