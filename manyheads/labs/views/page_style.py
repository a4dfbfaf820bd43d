"""The style of the page of findings: light and dark, for a screen, a phone and paper."""

STYLE = """
.mh-labs { --ink: #1a1a1a; --paper: #fff; --soft: #595959; --line: #d5d5d5; --card: #f7f7f5; --good: #17663b;
  --warn: #7a5200; --bad: #a3162b; --link: #1558b0; font: 16px/1.55 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 46rem;
  margin: 0 auto; padding: 0 1rem 3rem; overflow-wrap: break-word }
.mh-labs h1 { font-size: 1.7rem; line-height: 1.25 }
.mh-labs h2 { font-size: 1.35rem; margin: 3rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem }
.mh-labs h3 { font-size: 1.08rem; line-height: 1.4; margin: 0 0 .5rem }
.mh-labs a { color: var(--link) }
.mh-labs article { margin: 2rem 0 }
.mh-labs cite, .mh-labs small, .mh-labs dt { color: var(--soft); font-style: normal; font-weight: normal;
  font-size: .88rem }
.mh-labs .claims { margin: .3rem 0 1rem; padding: .6rem 1rem .6rem 1.4rem; background: var(--card); border-radius: 6px;
  list-style: none; padding-left: 1rem }
.mh-labs .claims li + li { margin-top: .4rem }
.mh-labs nav ol { columns: 2 18rem; column-gap: 2.6rem; padding-left: 1.6rem }
.mh-labs .badge { font-size: .82rem; font-weight: 600; white-space: nowrap; border: 1.5px solid; border-radius: 99px;
  padding: .08rem .6rem; margin-left: .3rem; display: inline-block }
.mh-labs .holds { color: var(--good) }
.mh-labs .corrected, .mh-labs .open { color: var(--warn) }
.mh-labs .corrected { border-style: double; border-width: 3px }
.mh-labs .open { border-style: dashed }
.mh-labs .fails { color: #fff; background: var(--bad); border-color: var(--bad) }
.mh-labs .scroll { overflow-x: auto; max-width: 100%; margin: 1rem 0 }
.mh-labs figure svg { min-width: 24rem; display: block }
.mh-labs table { border-collapse: collapse; font-size: .92rem; color: inherit; background: none; margin: 0 }
.mh-labs caption { text-align: left; font-weight: 600; padding: .2rem .6rem .4rem 0 }
.mh-labs th { font-weight: 600; color: var(--soft) }
.mh-labs th, .mh-labs td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid var(--line); background: none }
.mh-labs .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.mh-labs .correction { border-left: 4px solid var(--warn); padding-left: .8rem }
.mh-labs .note { border-left: 4px solid var(--line); padding-left: .8rem }
.mh-labs pre { background: var(--card); border-radius: 6px; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem;
  line-height: 1.45; color: inherit }
.mh-labs code { font-size: .9em; color: inherit; overflow-wrap: anywhere }
.mh-labs sub { line-height: 0 }
.mh-labs summary { cursor: pointer; color: var(--soft); font-size: .9rem }
.mh-labs dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem }
.mh-labs dd { margin: 0; min-width: 0 }
.mh-labs footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem; font-size: .9rem }
@media (max-width: 30rem) { .mh-labs dl { display: block } .mh-labs dd { margin-bottom: .4rem } }
@media (prefers-color-scheme: dark) { .mh-labs { --ink: #ececec; --paper: #16181b; --soft: #b3b3b3; --line: #3a3f45;
  --card: #22262b;  --good: #6fd8a0; --warn: #e8bd62; --bad: #b3263b; --link: #86b7ff }
  body:has(> .mh-labs) { background: #16181b } }
@media print { .mh-labs { font-size: 10.5pt; max-width: none } .mh-labs h2 { break-after: avoid }
  .mh-labs h3 { break-after: avoid } .mh-labs figure, .mh-labs table, .mh-labs pre { break-inside: avoid }
  .mh-labs details, .mh-labs nav { display: none } .mh-labs .scroll { overflow: visible } }
"""
