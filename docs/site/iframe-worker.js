// A page that is opened from disk may not start a worker. Its script runs in a hidden frame then, so search works there too.
// Zensical takes this file in place of the one it would load from another host, because of its name.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      // Closing the document keeps the frame from replacing it when it has loaded.
      scope.document.open();
      scope.document.close();
      scope.postMessage = (message) => {
        const data = structuredClone(message);
        setTimeout(() => this.onmessage?.({ data }));
      };
      this.ready = new Promise((resolve, reject) => {
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => resolve(scope);
        script.onerror = (event) => reject(this.onerror?.(event));
        scope.document.documentElement.append(script);
      });
    }

    postMessage(message) {
      const data = structuredClone(message);
      this.ready.then((scope) => scope.onmessage({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
