"""`Exchange`: partials of all ranks in, merged rows of my heads out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Float

from jaxcp import lse as lse_lib
from jaxcp.errors import JaxcpError, invalid
from jaxcp.exchange import order
from jaxcp.exchange.resolve import module, resolve_together
from jaxcp.exchange.spec import ExchangeSpec
from jaxcp.lse import LogBase, Partial
from jaxcp.topology import Topology


class Exchange:
    """Sends each head's partials to the rank that keeps the head and merges them there.

        out[t, k] = merge over ranks i of partial_i[t, r h + k]          h = ceil(heads / cp), r = my rank

    Head j is row j mod h of rank j div h; a row without a head is the neutral element (0, -inf), so any head count
    works with any number of ranks. Build it outside jit, on every process; call it inside `jax.shard_map` over
    `axis_name`, on all ranks with the same number of tokens. Batches of more than `max_tokens` tokens are sliced in
    ascending order.

        exchange = jaxcp.Exchange(mesh, "cp", max_tokens=32, heads=128, head_dim=512)
        merged = jax.shard_map(lambda o, lse: exchange(jaxcp.Partial(o, lse, jaxcp.LogBase.TWO)), mesh=mesh, ...)

    Attributes:
      mesh, axis_name: where it works.
      cp, heads, heads_per_rank, head_dim, dtype, max_tokens: what it moves.
      backend: name of the backend in use.
    """

    def __init__(
        self,
        mesh: Mesh | AbstractMesh,
        axis_name: str,
        *,
        max_tokens: int,
        heads: int,
        head_dim: int,
        dtype: Any = "bfloat16",
        backend: str = "auto",
        timeout_s: float = 30.0,
    ):
        """Resolves the backend and sets it up; collective over all processes of the job, unless a collective is named.

        Args:
          mesh: whose axis the keys are split over; the other axes make independent groups.
          axis_name: that axis.
          max_tokens: rows of one call; sizes the workspace of backends that own memory.
          heads: query heads of the group.
          head_dim: width of a row (512 for absorbed MLA).
          dtype: of the rows: bfloat16, float16, float32 (or float64, for checks).
          backend: "auto" or one of `jaxcp.exchange.BACKENDS`.
          timeout_s: seconds a rank of the fused backend waits for a peer before it gives up; ten times as long in the
            first run of each call of a program, whose peers may still be compiling it. XLA's collectives have no such
            bound (NCCL's own is off by default), FlashInfer's kernel neither.

        Raises:
          ValueError, TypeError: bad arguments.
          BackendError: a backend asked for by name is blocked, the message says by what; or set-up failed somewhere.
          NotImplementedError: the backend owns memory, and a group's ranks turn out to be on several hosts that cannot
            use fabric handles.
        """
        topology = Topology.of(mesh, axis_name)
        self.spec = ExchangeSpec.of(topology, heads=heads, head_dim=head_dim, dtype=dtype, max_tokens=max_tokens)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 1e-3 <= timeout_s <= 1e8:
            raise invalid("timeout_s", repr(timeout_s), "0.001 to 1e8 seconds", "30.0 suits most hosts.")
        self.mesh, self.topology = mesh, topology
        self.resolution = resolve_together(topology, self.spec, backend)
        self._engine = module(self.backend).Engine(topology, self.spec, float(timeout_s))
        self._closed = False

    axis_name = property(lambda self: self.topology.axis_name)
    cp = property(lambda self: self.spec.cp)
    heads = property(lambda self: self.spec.heads)
    heads_per_rank = property(lambda self: self.spec.heads_per_rank)
    head_dim = property(lambda self: self.spec.head_dim)
    dtype = property(lambda self: self.spec.dtype)
    max_tokens = property(lambda self: self.spec.max_tokens)
    backend = property(lambda self: self.resolution.chosen)

    def __call__(self, partial: Partial, *, return_lse: bool = False):
        """Merged rows of this rank's heads; in shard_map.

        On CPU the fused backend's calls in two nested functions (bodies of scan, cond, ...) of one program may start in
        another order on each rank, and wait in vain: pass something from the first into the second.

        Args:
          partial: o [tokens, heads, dim], lse [tokens, heads] or [tokens, heads, 1]: this rank's partials of all heads.
          return_lse: also return the merged LSE.

        Returns:
          [tokens, heads_per_rank, dim] in the dtype of `o`; with `return_lse` a pair with [tokens, heads_per_rank],
          float32, in the base of `partial`.

        Raises:
          ValueError, TypeError: shapes or dtypes other than declared, or a call outside shard_map over the axis.
          NotImplementedError: it is differentiated.
          JaxcpError: the exchange is closed.
        """
        if self._closed:
            raise JaxcpError("exchange: it is closed, its memory is given back. Build a new Exchange.")
        partial = lse_lib.validated(partial, rank=3)
        self._check_shape(partial)
        self._check_axis()
        (o, lse), token = self._batched(partial.base, return_lse)(partial.o, partial.lse, order.current())
        order.enter(token)
        return (o, lse) if return_lse else o

    def check(self) -> None:
        """Raises what went wrong on a device since the last check, e.g. `PeerTimeoutError`; call it between steps."""
        self._engine.check()

    def reset(self) -> None:
        """Makes the exchange usable again after a failure; collective over all processes of the job, outside jit.

        Wait for the results of all earlier steps first. It meets the other processes, without a bound of its own: where
        one is dead, start the job anew.
        """
        self._engine.reset()

    def close(self) -> None:
        """Gives device memory back. Programs that captured the exchange must not run afterwards.

        Collective over all processes of the job: they meet, and jax gives that meeting no bound, so a process that
        never calls it lets the others hang. After `PeerTimeoutError` it is local to the processes whose ranks
        waited in vain: they meet nobody, and their blocks stay until they end. Where only some processes saw the error,
        the others would wait for them: let all agree on it, or end the job without `close`.
        """
        if not self._closed:
            self._engine.close()
            self._closed = True

    def describe(self) -> dict[str, Any]:
        """Backend, shapes, bytes and capacity as data."""
        facts = {
            "backend": self.backend, "reason": self.resolution.reason, "axis_name": self.axis_name, "cp": self.cp,
            "groups": len(self.topology.groups), "platform": self.topology.platform, "heads": self.heads,
            "heads_per_rank": self.heads_per_rank, "head_dim": self.head_dim, "dtype": self.dtype.name,
            "max_tokens": self.max_tokens,
        }  # fmt: skip
        return facts | self._engine.describe()

    def _batched(self, base: LogBase, return_lse: bool):
        """The exchange as a function of arrays that vmap folds into tokens: a batch costs one exchange, not many."""

        @custom_vmap
        def call(o, lse, token):
            order.enter(token)  # a custom_vmap function is a trace of its own: join it to the calls outside
            return self._sliced(Partial(o, lse, base), return_lse), order.current()

        @call.def_vmap
        def fold(size, in_batched, o, lse, token):
            o, lse = (
                x if batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, batched in zip((o, lse), in_batched, strict=False)
            )
            out, token = call(o.reshape(-1, *o.shape[2:]), lse.reshape(-1, *lse.shape[2:]), token)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
            return (out, token), (jax.tree.map(lambda x: True, out), False)

        return _without_derivative(call)

    def _sliced(
        self, partial: Partial, return_lse: bool
    ) -> tuple[Float[Array, "tokens rows dim"], Float[Array, "tokens rows"] | None]:
        tokens = partial.o.shape[0]
        if tokens == 0:
            empty = lse_lib.neutral((0, self.heads_per_rank, self.head_dim), self.dtype, partial.base)
            return empty.o, empty.lse if return_lse else None
        if tokens <= self.max_tokens:
            return self._engine(partial, return_lse)
        slices = [slice(start, start + self.max_tokens) for start in range(0, tokens, self.max_tokens)]
        merged = [self._engine(Partial(partial.o[s], partial.lse[s], partial.base), return_lse) for s in slices]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *merged)

    def _check_shape(self, partial: Partial) -> None:
        if partial.o.shape[1:] != (self.heads, self.head_dim):
            raise invalid(
                "partial.o.shape",
                partial.o.shape,
                f"[tokens, heads={self.heads}, dim={self.head_dim}]",
                "Heads and dim are declared when the Exchange is built; only tokens may vary.",
            )
        if partial.o.dtype != self.dtype:
            raise invalid(
                "partial.o.dtype",
                partial.o.dtype,
                f"{self.dtype}, as declared",
                "Cast, or build the Exchange with this dtype.",
                TypeError,
            )

    def _check_axis(self) -> None:
        try:
            size = lax.axis_size(self.axis_name)
        except NameError:
            raise invalid(
                "exchange",
                f"a call outside the axis {self.axis_name!r}",
                f"a call inside jax.shard_map over {self.axis_name!r}",
                "Wrap the step in jax.shard_map with the Exchange's mesh.",
            ) from None
        here, built = jax.sharding.get_abstract_mesh(), self.mesh
        if size != self.cp or (here.axis_names, here.axis_sizes) != (built.axis_names, built.axis_sizes):
            raise invalid(
                "exchange",
                f"a mesh of axes {dict(here.shape)}",
                f"{dict(built.shape)}, in this order",
                "Use the mesh that the Exchange was built with: who is whose peer depends on it.",
            )


def _without_derivative(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which raises when it is differentiated: some backends move bits, whose derivative jax takes for zero."""
    guarded = jax.custom_jvp(fn)

    @guarded.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            "exchange: it has no derivative, because it serves inference. Put "
            "jax.lax.stop_gradient around its inputs, or merge gathered partials with lse.merge."
        )

    return guarded
