"""The end of a rank whose function has returned."""

import dataclasses
import threading
import time
from multiprocessing import Pipe

from flytekitplugins.daskpytorch.protocol.failure import Recalled
from flytekitplugins.daskpytorch.protocol.messages import Answer, Ask, Question, unpack
from flytekitplugins.daskpytorch.rank.link import GangLink
from flytekitplugins.daskpytorch.rank.session import Session
from gangs import order_for


def test_rank_with_nccl_that_has_returned_says_so_once_its_threads_have_ended() -> None:
    order = order_for(backend="nccl")
    order = dataclasses.replace(order, place=dataclasses.replace(order.place, world_size=2))
    may_end = threading.Event()
    works_on = threading.Thread(target=may_end.wait)
    works_on.start()
    agents, ranks = Pipe()
    with agents, ranks:
        link = GangLink(ranks, order)
        session = Session(order, link)

        def recalled() -> Recalled:
            session.follow(Ask(Question.COLLECTIVES, 1))
            [answer] = unpack(agents.recv_bytes())
            assert isinstance(answer, Answer)
            return answer.value

        leaving = threading.Thread(target=session.see_out, daemon=True)
        leaving.start()
        time.sleep(2.5)  # longer than the grace for peers
        assert not recalled().is_over
        may_end.set()
        until = time.monotonic() + 30
        while not recalled().is_over and time.monotonic() < until:
            time.sleep(0.1)
        assert recalled().is_over
        assert leaving.is_alive()  # its peers may still read its GPU's memory
        link.ended.set()
        leaving.join(10.0)
        works_on.join()
