"""From what a user passes in to a request the engine can take.

Owns: the forms a prompt may have, chats, truncation, limits, defaults of sampling values, seeds, ids of requests. All
that can be wrong with a request is found here, before the engine hears of it. Never touches: outputs, tensors, processes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypedDict

from deepinfer.engine.chat_template import NO_TEMPLATE, ChatTemplate, Message
from deepinfer.engine.content_parts import DataUrl, has_images
from deepinfer.engine.image_input import ImageRules, check_count, cut_spans, file_bytes, place_images, prepare_images
from deepinfer.engine.request import EngineRequest
from deepinfer.engine.tokenizer import Tokenizer, check_token_ids
from deepinfer.errors import ConfigError, EmptyPromptError, ImageError, InvalidRequestError, PromptTooLongError, SamplingParamsError
from deepinfer.models.images import ImageSpan
from deepinfer.sampling import SamplingParams, derive_seed


class PromptDict(TypedDict, total=False):
    """A prompt as a mapping: its text, its ids, or both (then the ids count and the text is only shown).

    ``images``: of models that take them, each a PIL image, a uint8 array ``[height, width, 3]``, the bytes of an image file or its path.
    The prompt has the model's image token once for each, in order, or as often as each takes tokens.
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    images: Sequence[Any]


Prompt = str | Sequence[int] | PromptDict
"""One prompt: text, token ids, or a :class:`PromptDict`."""


@dataclass(frozen=True)
class ModelLimits:
    """What an engine can take: positions, token ids and images."""

    max_model_len: int
    vocab_size: int
    images: ImageRules | None = None


_OTHER_TEMPLATE = "pass chat_template=<one that writes the image token once for each part of type 'image'>, or use generate() with 'images'"


class InputProcessor:
    """Prepares the requests of one engine.

    Args:
        tokenizer: ``None`` where prompts are ids only and no text is wanted.
        chat_template: ``None`` where the model has none.
        limits: of the engine.
        eos_ids: all ids that end a sequence.
        generation_config: the model's ``generation_config.json``, for default sampling values.
        seed: start of the seeds of requests that bring none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        *,
        limits: ModelLimits,
        eos_ids: Iterable[int] = (),
        generation_config: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self.limits = limits
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self._generation_config = dict(generation_config or {})
        self._seed = seed
        self._unseeded = itertools.count(1)
        self._names = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError where there is none."""
        if self._tokenizer is None:
            raise ConfigError("this model came without a tokenizer; pass tokenizer=<directory, hub id or GGUF file>, or use token ids")
        return self._tokenizer

    def default_params(self, **values: Any) -> SamplingParams:
        """The model's own sampling defaults, overridden by ``values``."""
        return SamplingParams.from_generation_config(self._generation_config, **values)

    def new_request_id(self) -> str:
        """An id that was not given out before."""
        return f"req-{next(self._names)}"

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> PromptDict:
        """A conversation as a prompt; what its messages say never becomes a control token, nor a place for an image.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses the messages.
            ImageError: a message has an image that the model or its template does not take, or that cannot be one.
        """
        if self.chat_template is None:
            raise InvalidRequestError(NO_TEMPLATE)
        with_images = has_images(messages)
        if with_images and self.limits.images is None:
            raise ImageError("this model takes no images; leave image parts out of the messages")
        try:
            made = self.chat_template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                template_kwargs=template_kwargs,
            )
        except ImageError:
            raise
        except InvalidRequestError as e:
            if with_images and e.__cause__ is not None:  # the template stumbled over content in parts
                raise ImageError(f"{e}: it may be for text alone; {_OTHER_TEMPLATE}") from e
            raise
        ids = self.tokenizer.encode_rendered(made.text, made.foreign)
        if not made.images:
            return {"prompt": made.text, "prompt_token_ids": ids}
        return {"prompt": made.text, "prompt_token_ids": ids, "images": self._chat_images(made.images, ids)}

    def _chat_images(self, sources: Sequence[Any], ids: Sequence[int]) -> list[Any]:
        """Images of a rendered conversation, once it is sure that the template wrote a placeholder for each."""
        rules = self.limits.images
        assert rules is not None
        check_count(len(sources), rules)
        tokenizer, token = self.tokenizer, rules.processor.token
        text = next((t for t, i in tokenizer.control_tokens.items() if i == token), None)
        if text is None or text not in tokenizer.special_token_texts:  # else an assistant's own words might spell it
            raise ImageError(
                f"the tokenizer does not know the image token {token} as a special token; use generate() with token ids and 'images'"
            )
        if ids.count(token) != len(sources):
            raise ImageError(
                f"the chat template writes {ids.count(token)} placeholders {text} for {len(sources)} images; {_OTHER_TEMPLATE}"
            )
        return [s.decoded(file_bytes(rules)) if isinstance(s, DataUrl) else s for s in sources]

    def prepare(self, prompt: Prompt, params: SamplingParams, request_id: str, *, stream: bool) -> tuple[EngineRequest, str | None]:
        """Checks and tokenises one prompt; gives the request and the prompt's text if it came as text.

        Raises:
            EmptyPromptError: no tokens.
            PromptTooLongError: no room for a single new token, or for ``min_tokens``.
            TokenOutOfRangeError: an id outside the vocabulary.
            SamplingParamsError: a sampling value names ids outside the vocabulary, or needs a tokenizer.
            ImageError: an image cannot be used, or the prompt has no place for it.
            InvalidRequestError: the prompt has none of the known forms.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        self._check_params(params)
        text, ids = self._read(prompt)
        ids, images = self._place_images(ids, prompt.get("images") if isinstance(prompt, Mapping) else None)
        params = params.clone(structured_outputs=None) if params.form is not None else params  # the engine gets a grammar instead
        whole, ids = len(ids), self._fit(ids, params)
        images = cut_spans(images, whole - len(ids))
        room = self.limits.max_model_len - len(ids)
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=ids,
            params=params,
            max_new=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_ids=self.eos_ids,
            seeds=params.seeds(0 if params.seed is not None or params.greedy else derive_seed(self._seed, next(self._unseeded))),
            bad_word_ids=self.tokenizer.bad_word_ids(params.banned_strings) if params.banned_strings else (),
            stream=stream or bool(params.stop_strings),
            salt=params.cache_salt.encode() if params.cache_salt else b"",
            priority=params.priority,
            arrival=time.monotonic(),
            images=images,
        )
        return request, text

    def _place_images(self, ids: list[int], images: Any) -> tuple[list[int], tuple[ImageSpan, ...]]:
        rules = self.limits.images
        prepared = [] if images is None else prepare_images(images, rules)
        if rules is None:
            return ids, ()
        token = rules.processor.token
        if not prepared:
            if token in ids:
                raise ImageError(f"the prompt has {ids.count(token)} placeholders (token {token}) and no images; give them as 'images'")
            return ids, ()
        return place_images(ids, prepared, token)

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if (text is None and ids is None) or (text is not None and not isinstance(text, str)):
                raise InvalidRequestError("a prompt given as a mapping needs 'prompt' (text) or 'prompt_token_ids' (a list of ids)")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None:
            if not text:
                raise EmptyPromptError("the prompt is empty; give at least one character or token id")
            ids = self.tokenizer.encode(text)
        elif hasattr(ids, "tolist"):
            ids = ids.tolist()  # numpy, torch
        if not isinstance(ids, Sequence) or isinstance(ids, bytes):
            raise InvalidRequestError(f"a prompt must be text, a list of token ids or a mapping, got {type(ids).__name__}")
        if not len(ids):
            raise EmptyPromptError("the prompt has no tokens; give at least one character or token id")
        return text, check_token_ids(ids, self.limits.vocab_size)

    def _fit(self, ids: list[int], params: SamplingParams) -> list[int]:
        longest = self.limits.max_model_len
        keep = params.truncate_prompt_tokens
        if keep is not None:
            ids = ids[-(keep if keep > 0 else max(longest - (params.max_tokens or 1), 1)) :]
        if len(ids) >= longest:
            raise PromptTooLongError(
                # Clients that shorten or move on to a longer model know the case by the first words.
                f"this model's maximum context length is {longest} tokens, and the prompt has {len(ids)} before the first new one; "
                "shorten it, set truncate_prompt_tokens, or raise max_model_len"
            )
        if params.min_tokens > longest - len(ids):
            raise PromptTooLongError(
                f"min_tokens={params.min_tokens} do not fit after a prompt of {len(ids)} tokens in a model length of {longest}; "
                "lower min_tokens or shorten the prompt"
            )
        return ids

    def _check_params(self, params: SamplingParams) -> None:
        vocab = self.limits.vocab_size
        for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", params.logit_bias or ())):
            for token in ids:
                if token >= vocab:
                    raise SamplingParamsError(f"{name} names token id {token}, but the vocabulary has {vocab} tokens; remove it")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab:
                raise SamplingParamsError(f"{name}={getattr(params, name)} is above the vocabulary of {vocab} tokens; use -1 for all")
        if self._tokenizer is None and params.detokenize:
            raise SamplingParamsError("without a tokenizer no text can be made; set detokenize=False, or pass tokenizer=")


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list: text, a mapping and a list of integers are one prompt.

    Raises:
        InvalidRequestError: something else than text, ids, mappings or a list of these.
    """
    if isinstance(prompts, str | Mapping) or hasattr(prompts, "tolist"):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError(f"prompts must be text, token ids or a list of these, got {type(prompts).__name__}")
    if prompts and (set(map(type, prompts)) == {int} or all(isinstance(p, Integral) for p in prompts)):  # the first is the quick one
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def split_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several, as a list."""
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str) and not isinstance(messages[0], Mapping):
        return list(messages)  # type: ignore[arg-type]
    return [messages]  # type: ignore[list-item]


def match_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Sampling values for each of ``count`` prompts.

    Raises:
        InvalidRequestError: a list of another length.
    """
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        got = f"{len(params)} of them" if isinstance(params, Sequence) else type(params).__name__
        raise InvalidRequestError(f"sampling_params must be one SamplingParams or one for each of the {count} prompts, got {got}")
    return list(params)
