// Recent requests of this gateway; each opens its waterfall and story.

import { byId, h, keyed, text } from "./dom.js";
import { ago, duration } from "./format.js";
import { opener, table } from "./tables.js";

export class Requests {
  constructor(onOpen) {
    this.latest = [];
    this.table = table(byId("requests-table"), {
      label: "Recent requests",
      keyOf: (request) => request.request_id,
      empty: "No request has ended at this gateway, or none is as chosen.",
      rowClass: (request) => (request.outcome === "OK" ? "" : "failed"),
      columns: [
        { name: "Request", make: () => opener(onOpen, (request) => request.request_id, (id) => `Where the time of request ${id} went`) },
        { name: "Model", cell: (request) => request.model },
        { name: "Outcome", cell: (request) => request.outcome },
        { name: "Took", number: true, cell: (request) => duration(request.total_ns) },
        { name: "Ended", number: true, cell: (request) => ago(request.ended_ago_ns) },
      ],
    });
    for (const id of ["request-model", "request-outcome"]) byId(id).addEventListener("change", () => this.filter());
  }

  show(requests) {
    this.latest = requests;
    const models = [...new Set(requests.map((request) => request.model))].sort();
    const choice = byId("request-model");
    const options = ["", ...models, ...(models.includes(choice.value) || !choice.value ? [] : [choice.value])];
    keyed(choice, options, (model) => model, (model) => h("option", { value: model }), (option, model) => text(option, model || "all"));
    this.filter();
  }

  filter() {
    const model = byId("request-model").value;
    const outcome = byId("request-outcome").value;
    this.table(
      this.latest.filter(
        (request) =>
          (!model || request.model === model) &&
          (!outcome || (request.outcome === "OK") === (outcome === "OK")),
      ),
    );
  }
}
