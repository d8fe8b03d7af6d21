"""A Flower federation in one process: no Ray, no daemons, and exceptions come through.

For a quick look and for CI. `flwr run` and simulations end with exit code 0 though clients failed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity  # private: the extra pins Flower for it

SERVER, RUN = 0, 1


class InProcessGrid(Grid):  # type: ignore[misc]
    """Calls a client app itself, once for each message, in the order of its nodes.

    Nodes are called 1, 2, …; each has a context of its own that lasts, with its place, from 0, as
    `partition-id`.
    """

    def __init__(
        self, app: ClientApp, clients: int = 2, run_config: Mapping[str, Any] | None = None
    ) -> None:
        self.app = app
        self.contexts = {
            node: Context(
                RUN,
                node,
                {"partition-id": node - 1, "num-partitions": clients},
                RecordDict(),
                dict(run_config or {}),
            )
            for node in range(1, clients + 1)
        }
        self.answers: dict[str, Message] = {}
        # What Flower asks of the process that makes messages
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, SERVER, 0

    @property
    def run(self) -> Any:
        return None

    def set_run(self, run: Any) -> None:
        """There is one run only."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Sequence[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Sequence[str]:
        names = []
        for message in messages:
            names.append(str(len(self.answers)))
            self.answers[names[-1]] = self._call(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Sequence[Message]:
        return [self.answers.pop(name) for name in list(message_ids) if name in self.answers]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Sequence[Message]:
        return [self._call(message) for message in messages]

    def _call(self, message: Message) -> Message:
        """Hands a client a message of its own, and the server its answer, as a wire would."""
        node = message.metadata.dst_node_id
        copied = Message(metadata=message.metadata, content=_copy(message.content))
        answer = self.app(copied, self.contexts[node])
        if answer.has_content():
            answer.content = _copy(answer.content)
        return answer


def _copy(content: RecordDict) -> RecordDict:
    """The records of a message anew; the values of their arrays are bytes, which nobody changes."""
    import copy

    return copy.deepcopy(content)
