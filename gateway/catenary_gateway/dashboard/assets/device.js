// The agent chosen on the map: what its device is, which links are slowest, and what can be ordered.

import { byId, facts, h, keyed, text } from "./dom.js";
import { bytes, digits, duration } from "./format.js";

const MOST_LINKS = 4;

export class DevicePanel {
  /** `orders` are an operator's, by which the panel offers those about an agent. */
  constructor(orders, onClose) {
    this.orders = orders;
    byId("device-close").addEventListener("click", onClose);
  }

  show(status, agentId) {
    const agent = status.agents.find((each) => each.agent_id === agentId);
    byId("device").hidden = !agent;
    if (!agent) return;
    text(byId("device-title"), agentId);
    facts(byId("device-facts"), [
      ["Machine", agent.server_id || "unknown"],
      ["Class", agent.device_class || agent.device],
      ...(agent.virtual_level > 1 ? [["Share of the device", `1/${agent.virtual_level} of ${agent.device_id || "a device"}`]] : []),
      ...hardwareOf(agent.device_facts),
      ...linksOf(status, agent.server_id),
      ...agent.impairments.map((each) => [`Against it: ${each.kind.replaceAll("_", " ")}`, each.why || "no reason given", "bad"]),
    ]);
    keyed(
      byId("device-orders"), this.orders.about("agent_id"), (name) => name,
      (name) => h("button", { type: "button" }, `${name[0].toUpperCase()}${name.slice(1)} …`),
      (button, name) => {
        button.onclick = () => this.orders.ask(name, { agent_id: agentId });
      },
    );
  }
}

function hardwareOf(device) {
  if (!device) return [["Device", "nothing is told of it"]];
  const driver = [device.driver, device.cuda && `CUDA ${device.cuda}`].filter(Boolean).join(", ");
  return [
    ["Device", device.name],
    ["Cores", device.cores],
    ["Memory", device.total_bytes && bytes(device.total_bytes)],
    ["Compute capability", device.compute_capability],
    ["Driver", driver],
    ["PCIe", device.pcie_generation && device.pcie_width && `generation ${device.pcie_generation}, ${device.pcie_width} lanes`],
    ["Power limit", device.power_limit_milliwatts && `${digits(device.power_limit_milliwatts / 1000)} W`],
    ["MIG", device.mig_mode === "on" && "on"],
    ["Vector instructions", device.vector_instructions.join(", ")],
  ].filter(([, value]) => value);
}

/** The slowest links from a machine. */
function linksOf(status, machine) {
  const links = (status.links || []).filter((link) => link.source_server_id === machine);
  return links.slice(0, MOST_LINKS).map((link) => [
    `Link to ${link.target_server_id}`,
    `${duration(link.round_trip_ns)} there and back, ${bytes(link.bytes_per_second)}/s`,
  ]);
}
