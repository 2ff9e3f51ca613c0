"""The style sheet of the report, for light and dark screens and for paper."""

STYLE = """
:root{--bg:#f7f7f5;--card:#fff;--ink:#1c1e21;--soft:#6b7076;--line:#e4e4e0;--c0:#2563c9;--c1:#d9622b;
--c2:#2a9d6e;--c3:#a23fb5;
--c4:#c29a0b;--c5:#0e93a8;--c6:#c93a5d;--c7:#6a5acd;--c8:#7a8b2a;--c9:#8c6d4f;--c10:#9aa0a6}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1d2024;--ink:#e8e8e6;--soft:#9aa0a6;
--line:#31353a;--c0:#6ea0ff;--c1:#ff9460;
--c2:#5cd0a0;--c3:#d585e6;--c4:#e6c34a;--c5:#4cc7db;--c6:#ff7b9a;--c7:#a79bff;--c8:#b4c85a;--c9:#c8a27e;--c10:#7d838a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
.brand{margin:0;color:var(--c0);font-weight:650;letter-spacing:.04em;text-transform:uppercase;
font-size:12px}
h1{margin:2px 0 18px;font-size:26px;line-height:1.2;overflow-wrap:anywhere}
h2{margin:40px 0 12px;font-size:18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(175px,1fr));gap:12px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;display:flex;
flex-direction:column}
.tile span,.tile i{color:var(--soft);font-size:12.5px;font-style:normal}
.tile b{font-size:18px;font-weight:620;font-variant-numeric:tabular-nums;white-space:nowrap}
figure,.wide,article,details,table{background:var(--card);border:1px solid var(--line);border-radius:10px}
figure{margin:0;padding:12px 12px 8px}
.wide{padding:14px 14px 10px}
.narrow{display:none}
figcaption{display:flex;flex-direction:column;line-height:1.35;margin:0 0 6px 4px}
figcaption span{color:var(--soft);font-size:12.5px}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:14px}
.split{display:grid;grid-template-columns:minmax(0,1fr) 280px;gap:14px;align-items:start}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:10.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.stroke polyline{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.stroke polyline.raw{stroke-width:1;opacity:.35}
.stroke circle{stroke:none}
.stroke circle.hit{fill-opacity:0}
.stroke circle.hit:hover{fill-opacity:.6}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:2px 0 2px 10px;font-size:12.5px;color:var(--soft)}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;background:var(--c);
margin-right:6px;vertical-align:-1px}
table{border-collapse:separate;border-spacing:0;width:100%;font-size:13px;overflow:hidden}
th,td{text-align:left;padding:5px 12px;border-top:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums}
thead th{border-top:0;color:var(--soft);font-weight:550}
tbody tr:first-child td{border-top:0}
thead+tbody tr:first-child td{border-top:1px solid var(--line)}
.split td:not(:first-child),.split th:not(:first-child){text-align:right;white-space:nowrap}
.events td{overflow-wrap:anywhere}
.events td:first-child{white-space:nowrap;text-align:right;color:var(--soft)}
details{margin:0 0 10px;padding:10px 14px}
summary{cursor:pointer;font-weight:600}
summary i{font-style:normal;font-weight:400;color:var(--soft);font-size:13px;margin-left:6px}
article{margin:12px 0 4px;padding:10px 14px;background:var(--bg)}
.facts{display:flex;gap:12px;align-items:baseline}
.facts b{font-size:17px;font-variant-numeric:tabular-nums;color:var(--c0)}
.facts span{color:var(--soft);font-size:13px}
dl{display:grid;grid-template-columns:72px minmax(0,1fr);gap:4px 10px;margin:8px 0 2px}
dt{color:var(--soft);font-size:12.5px;padding-top:2px}
dd{margin:0}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,
Consolas,monospace}
.config{margin-top:10px;font-size:12px}
.none{color:var(--soft);margin:4px 0 10px}
.facts-of-run{margin:-14px 0 14px;color:var(--soft);font-size:13.5px;overflow-wrap:anywhere}
#now{margin:0 0 14px;font-size:13.5px}
#now:empty{display:none}
#now b{color:var(--c2)}
#now .members{display:flex;flex-wrap:wrap;gap:4px 14px;color:var(--soft)}
.tip{position:fixed;z-index:9;pointer-events:none;white-space:pre;background:var(--card);color:var(--ink);
border:1px solid var(--line);border-radius:8px;padding:6px 10px;font-size:12.5px;
font-variant-numeric:tabular-nums;box-shadow:0 2px 10px rgba(0,0,0,.18)}
.tip[hidden]{display:none}
@media (max-width:760px){.split{grid-template-columns:1fr}main{padding:20px 12px 48px}
.wide{display:none}.wide.narrow{display:block}.grid-of{grid-template-columns:1fr}.tile b{font-size:16px}
table{display:block;overflow-x:auto}dl{grid-template-columns:1fr}}
@media print{body{background:#fff}figure,article,.tile,.wide{break-inside:avoid}}
""" + "".join(
    f".c{i}{{--c:var(--c{i})}}.stroke.c{i} polyline{{stroke:var(--c{i})}}"
    f".stroke.c{i} circle,.fill.c{i}{{fill:var(--c{i})}}"
    for i in range(11)
)
