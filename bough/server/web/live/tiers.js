/** Where the content of a node lies: `lane` if a running request stands on it, else the fastest tier with some of it. */

export const TIERS = ["lane", "device", "host", "disk"];

/** The tier that a node is coloured by; null if it holds nothing. */
export function mainTier(node) {
  if (node.in_use) return "lane";
  return TIERS.find((tier) => node.tiers[tier] > 0) ?? null;
}

/** The shares of a node's content by tier, fastest first: [[tier, share]]; empty if it holds nothing. */
export function tierShares(node) {
  const counts = TIERS.filter((tier) => node.tiers[tier] > 0).map((tier) => [tier, node.tiers[tier]]);
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  return counts.map(([tier, count]) => [tier, count / total]);
}
