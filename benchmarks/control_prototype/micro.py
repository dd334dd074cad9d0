"""micro.py server KIND | client KIND PORT RATE SECONDS"""
import asyncio, sys, os, time, resource
import grpc, grpc.aio
from catenary_protos.catenary.v1 import scheduler_pb2, scheduler_pb2_grpc
from catenary_services.rules import parsed
from catenary_services.rules.checking import checking
from catenary_services.grpc.grpc_kit import open_channel, create_server, bind
from catenary_services.security.tls import ClientSecurity, ServerSecurity
from catenary_services.security.roles import RoleAuthorizer
from catenary_services.grpc.packed_writer import PackedWriter
from catenary_services.control.control_stream import ControlStream
from catenary_services.control.arrival_budget import ArrivalBudget
from catenary_services.control.pack_writer import PackWriter
from catenary_services.transport.frames import MessageKind
from catenary_scheduler.wire.streams import PeerStream, read_packs
GM, GMs = scheduler_pb2.GatewayMessage, scheduler_pb2.GatewayMessages
SM, SMs = scheduler_pb2.SchedulerToGatewayMessage, scheduler_pb2.SchedulerToGatewayMessages
def cpu():
    r = resource.getrusage(resource.RUSAGE_SELF); return r.ru_utime + r.ru_stime
def answer(m):
    return SM(reject=scheduler_pb2.RejectRequest(request_id=m.submit.request_id, failure=dict(reason="UNAVAILABLE", message="no")))
async def grpc_server():
    class S(scheduler_pb2_grpc.SchedulerServicer):
        async def GatewaySession(self, _, context):
            async def send(ms): await context.write(SMs(messages=ms))
            s = PeerStream(send)
            def handle(p):
                for m in p.messages:
                    if m.HasField("heartbeat"): print(cpu(), flush=True)
                    else: s.send(answer(m))
            await s.run(read_packs(context, s, handle))
    server = create_server(ServerSecurity(insecure=True), authorizer=RoleAuthorizer("m", insecure=True), max_message_bytes=16<<20)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(S(), server)
    print(bind(server, "127.0.0.1", 0, ServerSecurity(insecure=True)), flush=True)
    await server.start(); await asyncio.Event().wait()
async def tcp_server():
    budget = ArrivalBudget(64<<20)
    class H:
        def __init__(self):
            self.s = ControlStream(self, budget, lambda s: s.trust())
            self.w = PackWriter(self.write, lambda: self.s.is_full)
        def write(self, ms): self.s.write(MessageKind.PACK, SMs(messages=ms).SerializeToString())
        def received(self, kind, data):
            for m in parsed(GMs, data).messages:
                if m.HasField("heartbeat"): print(cpu(), flush=True)
                else: self.w.put(answer(m))
        def resumed(self): self.w.resumed()
        def ended(self, e): self.w.close()
    srv = await asyncio.get_running_loop().create_server(lambda: H().s, "127.0.0.1", 0)
    print(srv.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()
class Driver:
    def __init__(self): self.n = 0; self.wait = None
    def got(self, p):
        for m in p.messages: self.n += 1
        if self.wait and not self.wait.done(): self.wait.set_result(None)
async def client(kind, port, rate, seconds):
    d = Driver()
    if kind == "grpc":
        ch = open_channel(f"127.0.0.1:{port}", ClientSecurity(insecure=True))
        call = scheduler_pb2_grpc.SchedulerStub(checking(ch)).GatewaySession()
        async def send(ms): await call.write(GMs(messages=ms))
        w = PackedWriter(send)
        async def read():
            while True: d.got(await call.read())
        tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(w.run())]
    else:
        class H:
            def received(self, kind, data): d.got(parsed(SMs, data))
            def resumed(self): w.resumed()
            def ended(self, e): w.close()
        s = ControlStream(H(), ArrivalBudget(64<<20), lambda s: s.trust())
        await asyncio.get_running_loop().create_connection(lambda: s, "127.0.0.1", int(port))
        w = PackWriter(lambda ms: s.write(MessageKind.PACK, GMs(messages=ms).SerializeToString()), lambda: s.is_full)
    beat = GM(heartbeat=scheduler_pb2.Heartbeat())
    async def run(seconds):
        n0, i = d.n, 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            i += 1
            d.wait = asyncio.get_running_loop().create_future()
            w.put(GM(submit=scheduler_pb2.SubmitRequest(request_id=i, model="toy", model_version="1", rows=1, budget_ns=2000000000)))
            await d.wait
            if rate: await asyncio.sleep(1 / rate)
        return d.n - n0
    await run(1.0)
    w.put(beat); await asyncio.sleep(0.2); c0 = cpu()
    n = await run(seconds)
    c1 = cpu()
    w.put(beat); await asyncio.sleep(0.2)
    print(n, (c1 - c0) / n * 1e6, flush=True)
    os._exit(0)
import uvloop; asyncio.run = uvloop.run
a = sys.argv
if a[1] == "server": asyncio.run(grpc_server() if a[2] == "grpc" else tcp_server())
else: asyncio.run(client(a[2], a[3], float(a[4]), float(a[5])))
