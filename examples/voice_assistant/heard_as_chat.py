"""A transform that puts the transcript into a chat that asks for short answers."""

from omni import ChatPrompt, TransformContext, requires

INSTRUCTIONS = "You are a voice assistant. Answer in one or two short sentences."


@requires(num_sources=1)
def heard_as_chat(context: TransformContext) -> ChatPrompt:
    (heard,) = context.sources
    question = (heard.text or "").strip()
    if not question:
        raise ValueError("nothing was said")
    system = {"role": "system", "content": INSTRUCTIONS}
    return ChatPrompt((system, {"role": "user", "content": question}))
