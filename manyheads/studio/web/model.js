// The tab Model.

export const title = "Model";

export async function show(root) {
  return () => {};
}
