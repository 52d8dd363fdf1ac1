"""The site as a reader sees it: every page, opened in a browser, from a copy rendered as `make docs` does in CI."""
import functools,http.server,json,os,re,shutil,subprocess,sys,threading,urllib.error,urllib.request
from pathlib import Path
from urllib.parse import urldefrag

import pytest
from conftest import ROOT
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER,DRIVER = shutil.which("chromium"),shutil.which("chromedriver")
PAGES = [p.relative_to(ROOT).with_suffix("").as_posix() for p in sorted((ROOT/"nbs").rglob("*.ipynb"))
         if ".ipynb_checkpoints" not in p.parts]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1200,1000""".split()
NO_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # what a page loads from elsewhere is an error
pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER) and not os.environ.get("CI"),
                                reason="needs Chromium and its driver (apt-get install chromium chromium-driver)")
each_page = pytest.mark.parametrize("page", PAGES)

@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "Address of the rendered site, on a loopback server"
    copy = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT/"nbs", copy/"nbs")
    shutil.copy(ROOT/"_quarto.yml", copy)
    subprocess.run([Path(sys.executable).with_name("smalldocs"), "render", copy], check=True)
    subprocess.run([sys.executable, ROOT/".ci/mathml.py", copy/"_docs"], check=True)
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=copy/"_docs")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()

@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    "A headless browser that keeps its console log"
    assert BROWSER and DRIVER, "install chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS, NO_NETWORK, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]: options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    yield driver
    driver.quit()

@pytest.fixture
def opened(site, browser, page):
    "The browser with one page open, and its address"
    browser.get_log("browser")
    browser.get(f"{site}{page}.html")
    return browser,f"{site}{page}.html"

def sizes(browser, selector):
    "Width and height on the screen of what the selector finds in the page's text"
    return browser.execute_script("""return [...document.querySelectorAll('main '+arguments[0])]
        .map(o => o.getBoundingClientRect()).map(o => [o.width, o.height])""", selector)

@functools.cache
def fetch(url):
    "Status and text of a page of the site"
    try:
        with urllib.request.urlopen(url) as r: return r.status,r.read().decode(errors="replace")
    except urllib.error.HTTPError as e: return e.code,""

@each_page
def test_console_is_clean(opened):
    assert not opened[0].get_log("browser")

@each_page
def test_links_and_images_of_the_site_exist(opened, site):
    links = opened[0].execute_script("return [...document.querySelectorAll('a[href]')].map(o => o.href)")
    for url,anchor in (urldefrag(o) for o in links if o.startswith(site)):
        status,text = fetch(url)
        assert status == 200, url
        assert not anchor or f'id="{anchor}"' in text, f"{url}#{anchor}"
    broken = opened[0].execute_script("return [...document.images].filter(o => !o.naturalWidth).map(o => o.src)")
    assert not broken

def saved(page, kind, text=""):
    "How many outputs of one kind, with `text` in them, a page shows"
    cells = json.loads((ROOT/f"{page}.ipynb").read_text())["cells"]
    hidden = re.compile(r"#\|\s*(include|output):\s*false")
    shown = [o.get("data", {}) for c in cells if not hidden.search("".join(c["source"])) for o in c.get("outputs", [])]
    return sum(kind in data and text in "".join(data[kind]) for data in shown)

@each_page
def test_plots_and_tables_are_visible(opened, page):
    plots,tables = sizes(opened[0], "img"),sizes(opened[0], "table")
    assert len(plots) >= saved(page, "image/png") and all(min(o) > 20 for o in plots)
    assert len(tables) >= saved(page, "text/html", "<table") and all(min(o) > 20 for o in tables)

@each_page
def test_formulas_are_drawn(opened, page):
    text = "".join("".join(c["source"]) for c in json.loads((ROOT/f"{page}.ipynb").read_text())["cells"]
                   if c["cell_type"] == "markdown")
    displayed = len(re.findall(r"\$\$.+?\$\$", text, re.S))
    drawn = sizes(opened[0], "math")
    assert len(drawn) >= displayed and all(w > 2 and h > 2 for w,h in drawn)
    assert not re.search(r"\\[(\[]|\$\$", opened[0].execute_script(
        "return [...document.querySelectorAll('main p, main li, main td')].map(o => o.innerText).join(' ')"))
