// Scores the arithmetic example: 1 if the last number is the right one. `node build/main.js HOST:PORT NAME`

import { attach, type Item } from "./attach.js";

function right(item: Item): number {
  if (item.response === "throw") throw new Error("no opinion");
  return item.response.match(/\d+/g)?.at(-1) === item.ground_truth.trim() ? 1 : 0;
}

const [address, name] = process.argv.slice(2);
await attach(right, { address, name, token: process.env.PACELINE_REWARD_TOKEN });
