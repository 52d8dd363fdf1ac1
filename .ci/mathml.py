"""Draw the formulas of a site that smalldocs rendered as MathML, as Quarto does, so that no page needs the network."""
import html,re,sys
from pathlib import Path

from latex2mathml.converter import convert

MATH = re.compile(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', re.S)
KATEX = re.compile(r'<(?:link|script)[^>]*katex[^>]*>(?:</script>)?')

def mathml(page):
    "The HTML of a page with its formulas as MathML and without the scripts that would draw them"
    kind = dict(inline="inline", display="block")
    return KATEX.sub("", MATH.sub(lambda m: convert(html.unescape(m[2]), display=kind[m[1]]), page))

if __name__ == "__main__":
    for path in Path(sys.argv[1]).rglob("*.html"):
        text = path.read_text()
        if "katex" in text: path.write_text(mathml(text))
