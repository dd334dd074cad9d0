// The key dialog.

import { storedKey, storeKey } from "./api.js";
import { byId } from "./dom.js";

export class KeyDialog {
  constructor(onKey) {
    this.dialog = byId("key");
    this.dismissed = false;
    byId("key-button").addEventListener("click", () => this.open("A key with the scope “view” is enough."));
    byId("key-cancel").addEventListener("click", () => this.leave());
    this.dialog.addEventListener("cancel", () => {
      this.dismissed = true;
    });
    byId("key-forget").addEventListener("click", () => {
      storeKey("");
      byId("key-input").value = "";
      this.dialog.close();
      onKey();
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      storeKey(byId("key-input").value.trim());
      byId("key-input").value = "";
      this.dismissed = false;
      this.dialog.close();
      onKey();
    });
  }

  open(why) {
    byId("key-why").textContent = why;
    byId("key-forget").hidden = !storedKey();
    if (!this.dialog.open) this.dialog.showModal();
    byId("key-input").focus();
  }

  /** Opens by itself, but not again after somebody has closed it. */
  ask(why) {
    if (!this.dismissed) this.open(storedKey() ? `${why}.` : "This gateway asks for a key with the scope “view”.");
  }

  leave() {
    this.dismissed = true;
    this.dialog.close();
  }
}
