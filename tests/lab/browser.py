"""Opens a page in Chromium without a screen, and prints what is to be seen there, as JSON. `python browser.py PAGE`

Run as a process of its own: whatever Qt says or starts ends with it. The environment names its platform, `offscreen`.
"""

import json
import sys
from pathlib import Path

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage, QWebEngineUrlRequestInterceptor
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

LOOK = """
JSON.stringify(Array.from(document.querySelectorAll("figure")).map(figure => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const shown = Array.from(svg.querySelectorAll("text")).filter(text => text.checkVisibility()
        && text.getBoundingClientRect().width > 0);
    return {name: figure.id, left: box.left, right: box.right, height: box.height, words: shown.map(t => t.textContent),
            ids: Array.from(svg.querySelectorAll("[id]")).map(each => each.id),
            lost: (svg.innerHTML.match(/url\\(#[^)]+/g) || []).filter(each => !document.getElementById(each.slice(5)))};
}))
"""


class Page(QWebEnginePage):
    """Keeps what the console says."""

    def __init__(self, view):
        super().__init__(view)
        self.console = []

    def javaScriptConsoleMessage(self, level, message, line, source):
        self.console.append(message)


class Requests(QWebEngineUrlRequestInterceptor):
    """Keeps what the page asks for."""

    def __init__(self, parent):
        super().__init__(parent)
        self.addresses = []

    def interceptRequest(self, info):
        self.addresses.append(info.requestUrl().toString())


def main(path):
    app = QApplication(sys.argv)
    view = QWebEngineView()
    page, requests = Page(view), Requests(app)
    view.setPage(page)
    page.setUrlRequestInterceptor(requests)
    view.resize(1280, 900)
    view.show()

    def tell(figures):
        print(json.dumps({"console": page.console, "requests": requests.addresses, "figures": json.loads(figures)}))
        app.quit()

    page.loadFinished.connect(lambda done: QTimer.singleShot(100, lambda: page.runJavaScript(LOOK, 0, tell)))
    page.load(QUrl.fromLocalFile(str(Path(path).resolve())))
    app.exec()


if __name__ == "__main__":
    main(sys.argv[1])
