// Attaches to a run of Paceline and scores its items, by RewardGateway.Attach of the protocol's files.

import { readFileSync } from "node:fs";
import { hostname } from "node:os";
import { fileURLToPath } from "node:url";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

export interface Item {
  trajectory_id: string;
  prompt: string;
  response: string;
  ground_truth: string;
  data_source: string;
  extra_json: string;
}

export type Value = number | { reward: number; components?: Record<string, number> };
export type Reward = (item: Item) => Value | Promise<Value>;

export interface Options {
  address: string; // host:port of the run's reward service
  name: string; // one of the names under reward.attached of the run's configuration
  token?: string; // token of the scope "attach"
  ca?: string; // file with the run's authority, if it uses TLS
  dataSources?: string[];
  window?: number; // most items at a time
  version?: string; // version of the scoring: a change invalidates cached scores
}

const CONTRACT = 1;
const LONGEST_PAUSE_MS = 5000;
const PROTO = fileURLToPath(new URL("../../../proto", import.meta.url));

/** Scores what the run sends, and attaches again after a loss. Resolves when the run is over. */
export async function attach(score: Reward, options: Options): Promise<void> {
  const definition = loader.loadSync("paceline/rpc/v1/reward.proto", {
    includeDirs: [process.env.PACELINE_PROTO ?? PROTO],
    keepCase: true,
    longs: String,
    defaults: true,
    oneofs: true,
  });
  const loaded = grpc.loadPackageDefinition(definition) as any;
  const proof = options.ca
    ? grpc.credentials.createSsl(readFileSync(options.ca))
    : grpc.credentials.createInsecure();
  const client = new loaded.paceline.rpc.v1.RewardGateway(options.address, proof, {
    ...(options.ca ? { "grpc.ssl_target_name_override": "reward.paceline" } : {}),
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
  });
  let pause = 200;
  for (;;) {
    const end = await stream(client, score, options);
    if (end.forGood) break;
    if (end.error && isFinal(end.error.code)) throw end.error;
    pause = end.welcomed ? 200 : Math.min(2 * pause, LONGEST_PAUSE_MS);
    console.error(`attaching again in ${pause} ms: ${end.error?.details ?? "the stream ended"}`);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
  client.close();
}

interface End {
  forGood: boolean;
  welcomed: boolean;
  error?: grpc.ServiceError;
}

/** One stream, from hello to its end. */
function stream(client: any, score: Reward, options: Options): Promise<End> {
  const metadata = new grpc.Metadata();
  if (options.token) metadata.set("authorization", `Bearer ${options.token}`);
  const call = client.Attach(metadata);
  const end: End = { forGood: false, welcomed: false };
  let underWay = 0;
  let leaving = false;
  const finish = () => {
    if (leaving && underWay === 0) call.end();
  };
  const answer = async (ticket: string, item: Item) => {
    underWay += 1;
    const result = await resultOf(score, item);
    call.write({ answers: { answers: [{ ticket, result }] } });
    underWay -= 1;
    finish();
  };
  return new Promise((resolve) => {
    call.on("data", (message: any) => {
      if (message.message === "welcome") end.welcomed = true;
      if (message.message === "work") {
        for (const task of message.work.tasks) void answer(task.ticket, task.item);
      }
      if (message.message === "leave") {
        leaving = true;
        end.forGood = message.leave.for_good;
        finish();
      }
    });
    call.on("error", (error: grpc.ServiceError) => resolve({ ...end, error }));
    call.on("end", () => resolve(end));
    call.write({
      hello: {
        contract: CONTRACT,
        name: options.name,
        client: `${hostname()}/${process.pid}`,
        data_sources: options.dataSources ?? [],
        window: options.window ?? 64,
        version: options.version ?? "",
      },
    });
  });
}

/** What the function gives for an item; what it throws is this item's error. */
async function resultOf(score: Reward, item: Item) {
  const { trajectory_id } = item;
  try {
    const value = await score(item);
    const { reward, components = {} } = typeof value === "number" ? { reward: value } : value;
    if (!Number.isFinite(reward)) return { trajectory_id, error: `not_finite: the reward is ${reward}` };
    return { trajectory_id, reward, components };
  } catch (error) {
    return { trajectory_id, error: `raised: ${error}` };
  }
}

function isFinal(code: grpc.status): boolean {
  return code === grpc.status.UNAUTHENTICATED || code === grpc.status.INVALID_ARGUMENT;
}
