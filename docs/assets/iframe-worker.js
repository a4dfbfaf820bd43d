// Search from the file system: browsers start no Worker for a file:// page, so its script runs in a hidden iframe instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.ready = new Promise((resolve, reject) => {
        this.frame.addEventListener("load", () => {
          const inner = this.frame.contentWindow;
          const script = inner.document.createElement("script");
          inner.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
          script.src = url;
          script.onload = () => resolve(inner);
          script.onerror = reject;
          inner.document.head.append(script);
        }, { once: true });
      });
      document.documentElement.append(this.frame);
    }
    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then((inner) => inner.onmessage({ data: copy }), (error) => this.onerror?.(error));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
