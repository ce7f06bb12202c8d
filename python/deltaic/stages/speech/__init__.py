"""Speech: prompts, voices and the pipeline of checkpoints that speak."""

from deltaic.stages.speech.audio import WavWriter
from deltaic.stages.speech.config import SpeechConfig, is_speech_checkpoint, load_speech_config
from deltaic.stages.speech.params import SpeechParams
from deltaic.stages.speech.pipeline import SpeechPipeline
from deltaic.stages.speech.prompt import PromptBuilder, Voice
from deltaic.stages.speech.utterance import AudioChunk

__all__ = [
    "AudioChunk",
    "PromptBuilder",
    "SpeechConfig",
    "SpeechParams",
    "SpeechPipeline",
    "Voice",
    "WavWriter",
    "is_speech_checkpoint",
    "load_speech_config",
]
