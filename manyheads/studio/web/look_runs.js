// The runs that the page shows, by the requests that made them, and the matrices of their heads.

import { post } from "./api.js";
import { openSource } from "./source.js";

const [MAX_RUNS, MAX_SOURCES] = [4, 6];

export class Runs {
  constructor() {
    this.runs = new Map();
    this.sources = new Map();
  }

  load(request) { return kept(this.runs, JSON.stringify(request), MAX_RUNS, () => post("look/run", request)); }

  source(run, info, head) { return kept(this.sources, `${run.run}/${info.name}/${head}`, MAX_SOURCES, () => openSource(run, info, head)); }

  clear() {
    this.runs.clear();
    this.sources.clear();
  }
}

// the answer to a question, asked once as long as it is among the last ones
function kept(answers, key, most, ask) {
  const answer = answers.get(key) ?? ask();
  answers.delete(key);
  answers.set(key, answer);
  answer.catch(() => answers.delete(key));
  while (answers.size > most) answers.delete(answers.keys().next().value);
  return answer;
}
