// The runs that the page shows, by the requests that made them, and the matrices of their heads.

import { post } from "./api.js";
import { openSource } from "./source.js";

const [MAX_RUNS, MAX_SOURCES] = [4, 6];

export class Runs {
  constructor() {
    this.runs = new Map();
    this.sources = new Map();
  }

  load(request) { return cached(this.runs, JSON.stringify(request), MAX_RUNS, () => post("look/run", request)); }

  source(run, info, head) { return cached(this.sources, `${run.run}/${info.name}/${head}`, MAX_SOURCES, () => openSource(run, info, head)); }

  clear() {
    this.runs.clear();
    this.sources.clear();
  }
}

// the answer to a request, which is sent once as long as its answer is among the last ones
function cached(answers, key, maxAnswers, request) {
  const answer = answers.get(key) ?? request();
  answers.delete(key);
  answers.set(key, answer);
  answer.catch(() => answers.delete(key));
  while (answers.size > maxAnswers) answers.delete(answers.keys().next().value);
  return answer;
}
