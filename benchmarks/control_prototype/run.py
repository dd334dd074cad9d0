import subprocess, sys
for rnd in range(int(sys.argv[1])):
    for rate in (200, 0):
        for kind in ("grpc", "tcp"):
            s = subprocess.Popen([sys.executable, "/tmp/hc/micro.py", "server", kind], stdout=subprocess.PIPE, text=True)
            port = s.stdout.readline().strip()
            c = subprocess.run([sys.executable, "/tmp/hc/micro.py", "client", kind, port, str(rate), "4"], capture_output=True, text=True)
            if c.returncode: print(c.stderr); s.kill(); continue
            n, mine = c.stdout.split()
            a, b = float(s.stdout.readline()), float(s.stdout.readline())
            s.kill()
            print(rnd, rate, kind, n, f"client {float(mine):.0f} us, server {(b-a)/int(n)*1e6:.0f} us, sum {float(mine)+(b-a)/int(n)*1e6:.0f}", flush=True)
