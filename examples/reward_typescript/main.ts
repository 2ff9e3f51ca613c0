// Scores the arithmetic example: 1 for the right number. `node build/main.js HOST:PORT NAME`

import { attach, type Item } from "./attach.js";

function right(item: Item): number {
  if (item.response === "throw") throw new Error("no opinion");
  return item.response.trim() === item.ground_truth.trim() ? 1 : 0;
}

const [address, name] = process.argv.slice(2);
await attach(right, { address, name, token: process.env.PACELINE_REWARD_TOKEN });
