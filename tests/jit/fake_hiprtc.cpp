// A hipRTC that compiles nothing: it notes what it was asked, and hands out a file. Refuses text with "mistake" in it,
// and archs other than gfx942.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

namespace {
struct Program {
  std::string text, log, code;
};
std::string contents(const char* variable) {
  std::ifstream file(std::getenv(variable), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
}  // namespace

extern "C" {
int hiprtcVersion(int* major, int* minor) { return *major = 9, *minor = 1, 0; }
const char* hiprtcGetErrorString(int status) { return status == 6 ? "HIPRTC_ERROR_COMPILATION" : "unknown"; }
int hiprtcCreateProgram(Program** program, const char* text, const char* name, int, const char**, const char**) {
  *program = new Program{text, "", ""};
  std::ofstream(std::getenv("FAKE_HIPRTC_NOTES"), std::ios::app) << "name " << name << '\n';
  return 0;
}
int hiprtcCompileProgram(Program* program, int count, const char** options) {
  std::ofstream notes(std::getenv("FAKE_HIPRTC_NOTES"), std::ios::app);
  bool known = false;
  for (int i = 0; i < count; ++i) {
    notes << "option " << options[i] << '\n';
    known |= std::strcmp(options[i], "--offload-arch=gfx942") == 0;
  }
  if (!known || program->text.find("mistake") != std::string::npos) return program->log = "line 1: a mistake", 6;
  program->code = contents("FAKE_HIPRTC_CODE");
  return 0;
}
int hiprtcGetProgramLogSize(Program* program, std::size_t* size) { return *size = program->log.size() + 1, 0; }
int hiprtcGetProgramLog(Program* program, char* log) { return std::strcpy(log, program->log.c_str()), 0; }
int hiprtcGetCodeSize(Program* program, std::size_t* size) { return *size = program->code.size(), 0; }
int hiprtcGetCode(Program* program, char* code) {
  return std::memcpy(code, program->code.data(), program->code.size()), 0;
}
int hiprtcDestroyProgram(Program** program) { return delete *program, 0; }
}
