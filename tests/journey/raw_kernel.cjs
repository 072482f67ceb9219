// A front end without a Jupyter server: it starts the kernelspec's command itself and speaks ZeroMQ to it, and gives
// `@jupyterlab/services` a socket that looks like a WebSocket. VS Code's extension reaches local kernels this way.
//
//   node raw_kernel.cjs KERNEL_JSON CONNECTION_FILE CELL…      prints what a notebook would hold, as JSON
//
// A cell that prints "interrupt me" is interrupted.
const { createHmac, randomUUID } = require("node:crypto");
const { readFileSync } = require("node:fs");
const { spawn } = require("node:child_process");
const { once } = require("node:events");
const zmq = require("zeromq");
const { KernelMessage, ServerConnection } = require("@jupyterlab/services");
const { KernelConnection } = require("@jupyterlab/services/lib/kernel/default");

const [specFile, connectionFile, ...cells] = process.argv.slice(2);
const connection = JSON.parse(readFileSync(connectionFile, "utf8"));
const sign = (frames) => frames.reduce((hmac, frame) => hmac.update(frame), createHmac("sha256", connection.key)).digest("hex");

class RawSocket {
  protocol = "";
  readyState = 0;

  constructor() {
    const routingId = randomUUID();
    this.channels = { iopub: new zmq.Subscriber() };
    for (const name of ["shell", "control", "stdin"]) this.channels[name] = new zmq.Dealer({ routingId });
    for (const [name, socket] of Object.entries(this.channels)) {
      socket.connect(`tcp://${connection.ip}:${connection[`${name}_port`]}`);
      this.listen(name, socket);
    }
    this.channels.iopub.subscribe();
  }

  // Not before the kernel says so on iopub: what it sends there to whoever has not joined yet is lost, and with it the
  // "idle" that ends a request.
  open() {
    this.readyState = 1;
    this.onopen?.({ target: this });
  }

  async listen(channel, socket) {
    for await (const frames of socket) {
      const [signature, ...parts] = frames.slice(frames.findIndex((frame) => frame.toString() === "<IDS|MSG>") + 1);
      if (signature.toString() !== sign(parts.slice(0, 4))) throw new Error("a message that the kernel did not sign");
      const [header, parent_header, metadata, content] = parts.map((part) => JSON.parse(part.toString()));
      if (header.msg_type === "iopub_welcome") this.open();
      else this.onmessage?.({ data: JSON.stringify({ channel, header, parent_header, metadata, content, buffers: [] }) });
    }
  }

  send(data) {
    const { channel, header, parent_header, metadata, content } = JSON.parse(data);
    const parts = [header, parent_header ?? {}, metadata ?? {}, content].map((part) => Buffer.from(JSON.stringify(part)));
    this.sending = (this.sending ?? Promise.resolve()).then(() =>
      this.channels[channel].send(["<IDS|MSG>", sign(parts), ...parts]),
    );
  }

  close() {
    this.readyState = 3;
    for (const socket of Object.values(this.channels)) socket.close();
  }
}

async function run(kernel, code) {
  const outputs = [];
  const future = kernel.requestExecute({ code, allow_stdin: false });
  future.onIOPub = ({ header, content }) => {
    if (header.msg_type === "update_display_data") {
      const shown = outputs.filter((output) => output.transient?.display_id === content.transient.display_id);
      shown.forEach((output) => Object.assign(output, content));
    } else if (!["status", "execute_input"].includes(header.msg_type)) {
      outputs.push({ output_type: header.msg_type, ...content });
    }
    if (content.text?.includes("interrupt me")) {
      const asked = { msgType: "interrupt_request", channel: "control", session: kernel.clientId, content: {} };
      kernel.sendControlMessage(KernelMessage.createMessage(asked), true);
    }
  };
  const { content, metadata } = await future.done;
  return { reply: content, metadata, outputs };
}

async function main() {
  const argv = JSON.parse(readFileSync(specFile, "utf8")).argv.map((word) => word.replace("{connection_file}", connectionFile));
  const child = spawn(argv[0], argv.slice(1), { stdio: ["ignore", "ignore", "inherit"] });
  const kernel = new KernelConnection({
    model: { id: randomUUID(), name: "holdfast" },
    serverSettings: ServerConnection.makeSettings({ WebSocket: RawSocket, wsUrl: "ws://raw" }),
  });
  const { language_info } = await kernel.info;
  const done = [];
  for (const cell of cells) done.push(await run(kernel, cell));
  const asked = { msgType: "shutdown_request", channel: "control", session: kernel.clientId, content: { restart: false } };
  await kernel.sendControlMessage(KernelMessage.createMessage(asked), true).done;
  const [code] = await once(child, "exit");
  console.log(JSON.stringify({ language: language_info.name, cells: done, ended: code }));
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
