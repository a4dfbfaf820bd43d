// Only the latest of several requests counts: the answers to older ones are dropped.

export class Latest {
  constructor() { this.number = 0; }

  // begins a request; the function tells whether no other has begun since
  begin() {
    const number = ++this.number;
    return () => number === this.number;
  }

  // drops the answers to all requests so far
  drop() { this.number++; }
}
