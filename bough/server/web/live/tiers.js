/** Where the content of a node lies: `lane` if a running request stands on it, else the fastest tier with some of it. */

export const TIERS = ["lane", "device", "host", "disk"];

/** The tier that a node is coloured by; null if it holds nothing. */
export function mainTier(node) {
  if (node.in_use) return "lane";
  return TIERS.find((tier) => node.tiers[tier] > 0) ?? null;
}
