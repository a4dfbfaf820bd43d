// The tab Look.

export const title = "Look";

export async function show(root) {
  return () => {};
}
